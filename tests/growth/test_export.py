import copy
import pickle
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from esper.blueprints import blueprints, register, registry
from esper.blueprints.layers import Residual
from esper.growth import GrowingHost, GrownNetwork, Mode, Seed, SeedSetting, SeedSettings, export, load_grown
from esper.hosts import CNNHost, GPTHost, Host, Slot, count_parameters
from esper.lifecycle import Blend
from tests.growth.fixtures_hosts import FULL, ISOLATED, MIDDLE, all_equal, backward, batch, loss, model

HALF = SeedSetting(Mode.BLENDED, 0.5)
ABOUT = {"score": 61.5, "seed": 3, "data": {"name": "cifar10", "mean": [0.5, 0.5, 0.5]}, "command": None}
CNN = {"blocks": 3, "channels": 8, "kernel": 3, "pools": 2, "pool_slots": True, "resolution": 16, "classes": 10}
GPT = {"vocabulary": 40, "channels": 64, "heads": 4, "layers": 5, "segments": 5, "block_size": 12, "dropout": 0.1}
HOSTS: dict[str, dict[str, Any]] = {
    "cnn": {"target": "esper.hosts.CNNHost", "arguments": CNN},
    "transformer": {"target": "esper.hosts.GPTHost", "arguments": GPT},
}
SEEDS = (
    # a blueprint for each topology, its blend and its setting
    ({"cnn": "conv_light", "transformer": "mlp"}, Blend.ADD, FULL),
    ({"cnn": "depthwise", "transformer": "attention"}, Blend.MULTIPLY, FULL),
    ({"cnn": "bottleneck", "transformer": "lora"}, Blend.GATED, FULL),
    ({"cnn": "norm", "transformer": "norm"}, Blend.ADD, HALF),
    ({"cnn": "conv_small", "transformer": "mlp_small"}, Blend.ADD, ISOLATED),
)
each_topology = pytest.mark.parametrize("topology", HOSTS)


def gradient_step(module: nn.Module) -> None:
    """One step of gradient descent; torch's optimizers take seconds to import."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.05 * parameter.grad
    module.zero_grad()


@cache
def grown(topology: str) -> tuple[GrowingHost, SeedSettings]:
    """A trained host with seeds in all modes, and their settings; cached, so do not change it."""
    torch.manual_seed(0)
    host = CNNHost(**CNN) if topology == "cnn" else GPTHost(**GPT)
    growing = GrowingHost(host, coadapt=False)
    settings = {}
    for slot, (names, blend, setting) in zip(host.slots, SEEDS, strict=True):
        growing.graft(slot.name, names[topology], blend, rng_seed=1)
        settings[slot.name] = setting
    for index in range(3):
        backward(growing, settings, index)
        gradient_step(growing)
    return growing.eval(), settings


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """An exported network for each topology."""
    paths = {topology: tmp_path_factory.mktemp("grown") / f"{topology}.pt" for topology in HOSTS}
    for topology, path in paths.items():
        export(path, *grown(topology), host=HOSTS[topology], about=ABOUT)
    return paths


def export_and_load(path: Path, growing: GrowingHost, settings: SeedSettings) -> GrownNetwork:
    """Export a host of fixtures_hosts, and load it."""
    arguments = {
        "cnn": {**CNN, "blocks": 2, "pool_slots": False},
        "transformer": {**GPT, "layers": 2, "segments": 2, "dropout": 0.0},
    }[growing.host.topology]
    host = {"target": HOSTS[growing.host.topology]["target"], "arguments": arguments}
    export(path, growing, settings, host=host, about={})
    return load_grown(path)


def add_noise(module: nn.Module) -> None:
    """Change all weights, so that a seed is not the identity."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def rewrite(source: Path, target: Path, **entries: object) -> Path:
    """Copy a file with some entries replaced."""
    torch.save({**torch.load(source, weights_only=True), **entries}, target)
    return target


@each_topology
@pytest.mark.parametrize("autocast", [False, True])
def test_a_loaded_network_gives_bit_equal_outputs(topology: str, autocast: bool, files: Mapping[str, Path]) -> None:
    growing, settings = grown(topology)
    loaded, (x, _) = load_grown(files[topology]), batch(topology, 7)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = growing(x, settings)
        assert torch.equal(loaded(x), expected)
        assert not torch.equal(growing(x, {}), expected)


@each_topology
def test_every_folded_blueprint_gives_bit_equal_outputs(topology: str, tmp_path: Path) -> None:
    slot, (x, _) = MIDDLE[topology], batch(topology)
    for blueprint in blueprints(topology):
        growing = model(topology, 8 if topology == "cnn" else 64).eval()
        add_noise(growing.graft(slot, blueprint, Blend.ADD, rng_seed=1))
        loaded = export_and_load(tmp_path / "grown.pt", growing, {slot: FULL})
        with torch.no_grad():
            assert torch.equal(loaded(x), growing(x, {slot: FULL})), blueprint


class FullPrecision(nn.Module):
    """Returns float32, as normalisations do under autocast on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.1 * x.float()


def test_a_folded_seed_keeps_the_precision_of_the_features_under_autocast() -> None:
    growing, body, (x, _) = model("cnn", 8).eval(), FullPrecision(), batch("cnn")
    growing.seeds["block2"] = Seed(body, blueprint="full_precision", blend=Blend.ADD, channels=16, topology="cnn")
    folded = GrownNetwork(growing.host, {"block2": body}, {})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(folded(x), growing(x, {"block2": FULL}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_cross_fade_at_alpha_1_is_exactly_the_seed(dtype: torch.dtype) -> None:
    """Folding depends on it."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-8, 4, 1001)
    h, s = (
        scales[torch.randperm(1001, generator=generator)] * torch.randn(1001, generator=generator) for _ in range(2)
    )
    assert torch.equal(torch.lerp(h.to(dtype), s.to(dtype), 1.0), s.to(dtype))


def test_a_cross_fade_at_alpha_1_is_folded_into_the_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing = model("cnn", 8)
    growing.graft("block1", "conv_light", Blend.ADD, rng_seed=1)
    loaded = export_and_load(tmp_path / "grown.pt", growing, {"block1": FULL})
    assert isinstance(loaded.seeds["block1"], Residual)
    assert not any(isinstance(module, Seed) for module in loaded.modules())
    monkeypatch.setattr(torch, "lerp", None)
    loaded(batch("cnn")[0])


@each_topology
def test_only_seeds_in_the_output_are_in_the_file(topology: str, files: Mapping[str, Path]) -> None:
    growing, settings = grown(topology)
    loaded = load_grown(files[topology])
    exported = [slot for slot, setting in settings.items() if setting is not ISOLATED]
    assert list(loaded.seeds) == exported
    assert sum(isinstance(module, Seed) for module in loaded.modules()) == 3  # all but the folded one
    seeds = sum(count_parameters(growing.seed(slot)) for slot in exported)
    assert count_parameters(loaded) == count_parameters(growing.host) + seeds


def test_a_host_without_seeds_or_with_a_seed_at_alpha_0_is_exported_without_seeds(tmp_path: Path) -> None:
    growing = model("cnn", 8).eval()
    x, _ = batch("cnn")
    growing.graft("block1", "conv_light", Blend.MULTIPLY, rng_seed=1)
    for settings in ({}, {"block1": SeedSetting(Mode.FADING, 0.0)}):
        loaded = export_and_load(tmp_path / "grown.pt", growing, settings)
        assert not loaded.seeds
        assert torch.equal(loaded(x), growing.host(x))


def test_tied_weights_are_stored_once_and_stay_tied(files: Mapping[str, Path]) -> None:
    head, tokens = "host.segments.5.1.weight", "host.segments.0.0.tokens.weight"
    weights = torch.load(files["transformer"], weights_only=True)["weights"]
    assert weights[head].data_ptr() == weights[tokens].data_ptr()
    loaded = load_grown(files["transformer"])
    assert loaded.get_parameter(head) is loaded.get_parameter(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_precision_and_memory_format_are_restored(
    dtype: torch.dtype, memory_format: torch.memory_format, tmp_path: Path
) -> None:
    growing = model("cnn", 8).eval()
    growing.graft("block1", "conv_light", Blend.ADD, rng_seed=1)
    growing.to(dtype).to(memory_format=memory_format)
    add_noise(growing)
    loaded = export_and_load(tmp_path / "grown.pt", growing, {"block1": FULL})
    for one, other in zip(loaded.parameters(), growing.parameters(), strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
    x = batch("cnn")[0].to(dtype)
    with torch.no_grad():
        assert torch.equal(loaded(x), growing(x, {"block1": FULL}))


@each_topology
def test_a_file_is_plain_data_on_the_cpu(topology: str, files: Mapping[str, Path]) -> None:
    contents = torch.load(files[topology], weights_only=True)
    assert contents["host"] == HOSTS[topology]
    assert contents["seeds"][3] == [grown(topology)[0].host.slots[3].name, "norm", "ADD", 0.5]
    assert {tensor.device.type for tensor in contents["weights"].values()} == {"cpu"}
    assert load_grown(files[topology]).about == ABOUT


@each_topology
def test_exporting_and_loading_change_neither_model_nor_generator(
    topology: str, tmp_path: Path, files: Mapping[str, Path]
) -> None:
    growing, settings = grown(topology)
    before, generator = copy.deepcopy(growing.state_dict()), torch.get_rng_state()
    export(tmp_path / "new" / "grown.pt", growing, settings, host=HOSTS[topology], about={})
    loaded = load_grown(tmp_path / "new" / "grown.pt")
    assert not any(module.training for module in loaded.modules())
    add_noise(loaded)
    assert all_equal(before, growing.state_dict())
    assert torch.equal(generator, torch.get_rng_state())
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["grown.pt"]


@each_topology
def test_a_loaded_network_can_be_copied_saved_and_trained(topology: str, files: Mapping[str, Path]) -> None:
    loaded, (x, y) = load_grown(files[topology]), batch(topology)
    expected = loaded(x)
    copied = copy.deepcopy(loaded).to("cpu", torch.float32)
    assert torch.equal(copied(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(loaded))(x), expected)
    assert copied.about == ABOUT
    copied.train()
    losses = []
    for _ in range(5):
        losses.append(loss(copied(x), y))
        losses[-1].backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in copied.parameters())
        gradient_step(copied)
    assert losses[-1] < losses[0]
    assert torch.equal(loaded(x), expected)


def test_a_new_process_loads_with_one_call(files: Mapping[str, Path], tmp_path: Path) -> None:
    script = (
        "import sys, torch; from esper.growth import load_grown; torch.set_num_threads(int(sys.argv[4]));"
        "torch.save(load_grown(sys.argv[1])(torch.load(sys.argv[2])), sys.argv[3])"
    )
    (x, _), (growing, settings) = batch("cnn"), grown("cnn")
    torch.save(x, tmp_path / "x.pt")
    paths = [str(path) for path in (files["cnn"], tmp_path / "x.pt", tmp_path / "y.pt")]
    subprocess.run([sys.executable, "-c", script, *paths, str(torch.get_num_threads())], check=True, timeout=600)
    assert torch.equal(torch.load(tmp_path / "y.pt"), growing(x, settings))


class CustomHost(Host):
    """A host outside esper, with a weight that is not in its segments."""

    topology: ClassVar[str] = "cnn"

    def __init__(self, *, channels: int) -> None:
        super().__init__(
            [nn.Conv2d(3, channels, 3), nn.Sequential(nn.Flatten(), nn.Linear(channels * 14 * 14, 2))],
            [Slot("middle", channels)],
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def run(self, x: Tensor, start: str | None = None, stop: str | None = None) -> Tensor:
        return super().run(x if start else x * self.scale, start, stop)


def test_a_custom_host_is_imported_by_its_name(tmp_path: Path) -> None:
    growing, (x, _) = GrowingHost(CustomHost(channels=8), coadapt=True), batch("cnn")
    growing.graft("middle", "conv_light", Blend.ADD, rng_seed=1)
    add_noise(growing)
    host = {"target": f"{__name__}.CustomHost", "arguments": {"channels": 8}}
    export(tmp_path / "grown.pt", growing, {"middle": FULL}, host=host, about={})
    assert torch.equal(load_grown(tmp_path / "grown.pt")(x), growing(x, {"middle": FULL}))


def test_a_blueprint_that_is_not_registered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, growing = tmp_path / "grown.pt", model("cnn", 8)
    with monkeypatch.context() as patched:
        patched.setattr(registry, "_REGISTRY", {"cnn": blueprints("cnn")})
        register("cnn", "custom", lambda c: c * c, "custom blueprint")(
            lambda channels: nn.Conv2d(channels, channels, 1)
        )
        growing.graft("block1", "custom", Blend.ADD, rng_seed=1)
        export_and_load(path, growing, {"block1": FULL})
    with pytest.raises(ValueError, match=r"grown.pt: its seed in block1 .*blueprint=custom: is unknown.* registered"):
        load_grown(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path, files: Mapping[str, Path]) -> None:
    path, content = tmp_path / "grown.pt", files["cnn"].read_bytes()
    with pytest.raises(ValueError, match=r"grown.pt: the file does not exist\."):
        load_grown(path)
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1  # a bit of a weight
    for wrong in (b"", b"a text", pickle.dumps({"format": "a"}), content[:100], content[:-1], bytes(damaged)):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"grown.pt: is not a readable grown network"):
            load_grown(path)
    with pytest.raises(ValueError, match="is not a readable grown network"):
        load_grown(tmp_path)
    for other in (nn.Linear(1, 1), nn.Linear(1, 1).state_dict(), [1]):
        torch.save(other, path)
        with pytest.raises(ValueError, match=r"grown.pt: is (a torch file, but not a|not a readable) grown network"):
            load_grown(path)


def host_entry(target: str, **arguments: object) -> dict[str, object]:
    return {"host": {"target": target, "arguments": arguments}}


WRONG: dict[str, dict[str, object]] = {
    "has version 2": {"version": 2},
    r"does not have the entries of a grown network \(KeyError\('target'\)\)": {"host": {}},
    r"does not have the entries of a grown network \(ValueError": {"seeds": [["block1", "norm", "ADD"]]},
    "its host esper.hosts.Nothing cannot be imported": host_entry("esper.hosts.Nothing"),
    "its host nowhere.Host cannot be imported": host_entry("nowhere.Host"),
    "its host Host cannot be imported": host_entry("Host"),
    "its host torch.nn.Linear is not a subclass of esper.hosts.Host": host_entry("torch.nn.Linear"),
    "its host os.getcwd is not a subclass of esper.hosts.Host": host_entry("os.getcwd"),
    r"cannot be built from its arguments \(host.blocks=0: must": host_entry(
        "esper.hosts.CNNHost", **CNN | {"blocks": 0}
    ),
    r"cannot be built from its arguments \(.*'depth'\)": host_entry("esper.hosts.CNNHost", **CNN, depth=1),
    r"its seed in block9 cannot be built \(slot=block9: CNNHost has no such slot": {
        "seeds": [["block9", "norm", "ADD", 1.0]]
    },
    r"weights do not fit .* is host.segments.5.1.bias": host_entry("esper.hosts.CNNHost", **CNN | {"classes": 11}),
    "weights do not fit .* is host.segments.0.1.weight": {"weights": {}},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_file_with_wrong_entries_is_refused(sentence: str, tmp_path: Path, files: Mapping[str, Path]) -> None:
    path = rewrite(files["cnn"], tmp_path / "grown.pt", **WRONG[sentence])
    with pytest.raises(ValueError, match=f"grown.pt: .*{sentence}") as refused:
        load_grown(path)
    assert "\n" not in str(refused.value)


class OtherHost(CNNHost):
    """The same weights in another class."""


def test_a_network_that_cannot_be_loaded_is_not_exported(tmp_path: Path) -> None:
    (growing, settings), path = grown("cnn"), tmp_path / "grown.pt"

    def assert_refused(sentence: str, host: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        with pytest.raises(ValueError, match=sentence):
            export(path, growing, settings, host=host, about=about)
        assert not list(tmp_path.iterdir())

    assert_refused("about.data.root=/tmp: must be plain data", HOSTS["cnn"], {"data": {"root": Path("/tmp")}})
    assert_refused("about.scores.1=.*: must be plain data", HOSTS["cnn"], {"scores": [1.0, torch.ones(())]})
    assert_refused("its weights do not fit", {**HOSTS["cnn"], "arguments": {**CNN, "classes": 11}}, {})
    assert_refused("does not have the entries of a grown network", {"target": "esper.hosts.CNNHost"}, {})
    growing, settings = GrowingHost(OtherHost(**CNN), coadapt=True), {}
    assert_refused("host.target=esper.hosts.CNNHost: must be the class of the host, OtherHost", HOSTS["cnn"], {})


def test_a_failed_export_does_not_change_an_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growing, path = model("cnn", 8), tmp_path / "grown.pt"
    export_and_load(path, growing, {})
    before = path.read_bytes()

    def fail(contents: object, file: Any) -> None:
        file.write(b"a part")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        export_and_load(path, growing, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
