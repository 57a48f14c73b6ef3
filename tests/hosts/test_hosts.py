from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.blueprints import blueprints
from esper.config import compose_config, load_preset
from esper.config.build import outline_hosts
from esper.hosts import CNNHost, Dropout, GPTHost, Host, Slot, count_parameters
from esper.hosts.cnn import GlobalMean

PRESETS = {
    "cifar_baseline": 6_418,
    "cifar_scale": 99_922,
    "cifar_impaired": 77,
    "cifar_minimal": 164,
    "cifar_deep_impaired": 1_140,
    "cifar_highres": 24_346,
    "cifar_poc": 94_762,
    "cifar_blind": 3_482,
    "cifar_colour": 3_482,
    "cifar_linear": 6_418,
    "cifar_saturated": 6_362,
    "cifar_unnormalised": 6_362,
    "cifar_unmixed": 1_090,
    "cifar_waist": 2_418,
    "tinystories": 30_044_544,
    "tinystories_small": 325_840,
    "tinystories_blind": 84_048,
    "tinystories_no_mlp": 56_256,
    "tinystories_unnormalised": 111_888,
}
SMALL_GPT = {
    "vocabulary": 40, "channels": 16, "heads": 2, "layers": 4, "segments": 2, "block_size": 8, "dropout": 0.1,
}  # fmt: skip
SMALL_CNN = {
    "blocks": 3, "channels": 4, "kernel": 3, "pools": 2, "pool_slots": True, "resolution": 16, "classes": 10,
}  # fmt: skip


def example(host: Host) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(host, GPTHost):
        return torch.randint(40, (2, 8), generator=generator)
    return torch.randn(2, 3, 16, 16, generator=generator)


@pytest.mark.parametrize(("preset", "parameters"), PRESETS.items())
def test_a_preset_has_its_number_of_parameters(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        assert count_parameters(load_preset(f"host/{preset}")) == parameters


def test_cifar_slots_has_hosts_of_five_slot_counts() -> None:
    hosts = outline_hosts(compose_config("evaluate", ["host=cifar_slots", "data.resolution=8"]))
    assert [len(host.slots) for host in hosts.values()] == [1, 2, 3, 5, 8]
    assert [count_parameters(host) for host in hosts.values()] == [490, 986, 3_482, 3_630, 3_630]


def test_cifar_diagnosis_has_hosts_that_lack_different_things() -> None:
    hosts = outline_hosts(compose_config("evaluate", ["host=cifar_diagnosis", "data.resolution=8"]))
    assert list(hosts) == ["cifar_blind", "cifar_linear", "cifar_saturated", "cifar_baseline"]
    assert len({host.slots for host in hosts.values()}) == 2  # cifar_blind is wider


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "tinystories"])
@pytest.mark.parametrize("training", [True, False])
def test_running_in_parts_is_bit_equal_to_running_at_once(preset: str, training: bool) -> None:
    host = load_preset(f"host/{preset}", **({"resolution": 16} if preset.startswith("cifar") else {})).train(training)
    x = example(host)
    whole = host(x)
    names = [slot.name for slot in host.slots]
    for first in names:
        at_first = host.run(x, stop=first)
        assert at_first.shape[1 if host.topology == "cnn" else 2] == host.slot(first).channels
        assert torch.equal(host.run(at_first, start=first), whole)
        for second in names[names.index(first) :]:
            assert torch.equal(host.run(host.run(at_first, first, second), start=second), whole)


def test_cifar_colour_does_not_depend_on_the_position_of_pixels() -> None:
    host = load_preset("host/cifar_colour", resolution=16, kernel=3).eval()
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    shuffled = x.flatten(2)[..., torch.randperm(256, generator=torch.Generator().manual_seed(1))].view_as(x)
    torch.testing.assert_close(host(shuffled), host(x))
    assert host.run(x, stop="block1").shape == (2, 16, 1, 1)


def test_slots_follow_blocks_and_optionally_pools() -> None:
    assert CNNHost(**SMALL_CNN).slots == (
        Slot("block1", 4), Slot("pool1", 4), Slot("block2", 8), Slot("pool2", 8), Slot("block3", 16),
    )  # fmt: skip
    host = CNNHost(**{**SMALL_CNN, "pool_slots": False})
    assert [slot.name for slot in host.slots] == ["block1", "block2", "block3"]
    assert host.run(example(host), stop="block2").shape == (2, 8, 8, 8)  # before its pool


@pytest.mark.parametrize(
    "changes", [{}, {"norm": False}, {"activation": "sigmoid"}, {"mixing": False}, {"waist": 3}], ids=str
)
def test_a_cnn_runs_in_channels_last(changes: dict[str, Any]) -> None:
    host = CNNHost(**SMALL_CNN, **changes)
    for slot in host.slots:
        assert host.run(example(host), stop=slot.name).is_contiguous(memory_format=torch.channels_last)


def layers(host: Host, index: int) -> list[type[nn.Module]]:
    """The kinds of layers of a segment."""
    return [type(layer) for layer in host.segments[index].children()]


def test_a_block_without_norm_has_a_bias_instead() -> None:
    host = CNNHost(**SMALL_CNN, norm=False, extra_blocks=1)
    assert layers(host, 0)[1:] == [nn.Conv2d, nn.ReLU]
    convolutions = [module for module in host.modules() if isinstance(module, nn.Conv2d)]
    assert [layer.bias is not None for layer in convolutions] == [True] * 4
    assert not any(isinstance(module, nn.BatchNorm2d) for module in host.modules())


@pytest.mark.parametrize(("activation", "expected"), [("sigmoid", [nn.Sigmoid]), ("tanh", [nn.Tanh]), ("none", [])])
def test_a_block_ends_with_its_activation(activation: str, expected: list[type[nn.Module]]) -> None:
    host = CNNHost(**SMALL_CNN, activation=activation)
    assert layers(host, 0)[1:] == [nn.Conv2d, nn.BatchNorm2d, *expected]


def test_a_cnn_without_activations_and_pools_is_affine() -> None:
    host = CNNHost(**{**SMALL_CNN, "pools": 0}, activation="none").eval()
    one, other = example(host)
    middle = host(((one + other) / 2)[None])
    torch.testing.assert_close(middle[0], host(example(host)).mean(0))


def test_without_mixing_a_channel_depends_on_one_channel_of_the_block_before() -> None:
    host = CNNHost(**SMALL_CNN, mixing=False, activation="none", extra_blocks=1).eval()  # ReLU could hide a change
    features = host.run(example(host), stop="block1")
    changed = features.clone()
    changed[:, 1] += 1
    differs = (host.run(changed, "block1", "block3") != host.run(features, "block1", "block3")).any(0).flatten(1).any(1)
    assert differs.nonzero().flatten().tolist() == [4, 5, 6, 7]  # of 16: each block doubles the channels
    images = example(host)
    assert not torch.equal(host.run(images.flip(1), stop="block1")[:, 0], host.run(images, stop="block1")[:, 0])


@pytest.mark.parametrize(("blocks", "segment", "width"), [(1, 2, 4), (2, 2, 4), (3, 4, 8), (4, 4, 8), (5, 5, 16)])
def test_a_waist_follows_the_pool_of_the_middle_block(blocks: int, segment: int, width: int) -> None:
    host = CNNHost(**{**SMALL_CNN, "blocks": blocks}, waist=2)
    kinds = layers(host, segment)
    assert kinds[:2] == [nn.Conv2d, GlobalMean if blocks == 1 else nn.Conv2d]
    first = host.segments[segment][0]
    assert (first.in_channels, first.out_channels, first.kernel_size, first.bias) == (width, 2, (1, 1), None)
    following = next(layer for layer in list(host.segments[segment])[1:] if isinstance(layer, nn.Conv2d | nn.Linear))
    assert following.weight.shape[1] == 2
    assert host(example(host)).shape == (2, 10)


@pytest.mark.parametrize("channels", [5, 7, 11, 24])
def test_a_cnn_of_any_width_runs_with_every_blueprint(channels: int) -> None:
    host = CNNHost(**{**SMALL_CNN, "channels": channels, "pools": 3}).train()
    assert host(example(host)).isfinite().all()
    for slot in host.slots:
        features = host.run(example(host), stop=slot.name)
        for entry in blueprints("cnn").values():
            assert torch.equal(entry.build(slot.channels)(features), features)


@pytest.mark.parametrize("channels", [32, 44, 96])
@pytest.mark.parametrize("changes", [{}, {"heads": 0}, {"mlp": False}, {"norm": False}], ids=str)
def test_a_gpt_of_one_layer_runs_with_every_blueprint(channels: int, changes: dict[str, Any]) -> None:
    host = GPTHost(**{**SMALL_GPT, "channels": channels, "layers": 1, "segments": 1, **changes}).eval()
    features = host.run(example(host), stop="segment1")
    assert host(example(host)).isfinite().all()
    for entry in blueprints("transformer").values():
        assert torch.equal(entry.build(channels)(features), features)


def test_a_gpt_without_mlp_and_norm_has_attention_only() -> None:
    host = GPTHost(**SMALL_GPT, mlp=False, norm=False)
    kinds = {type(module) for module in host.modules() if not list(module.children())}
    assert kinds == {nn.Embedding, nn.Linear, nn.Identity, Dropout}
    per_layer = 4 * 16 * 16 + 4 * 16
    assert count_parameters(host) == (40 + 8) * 16 + 4 * per_layer


def test_branches_of_a_new_gpt_are_smaller_the_more_there_are() -> None:
    def scale(**changes: Any) -> float:
        torch.manual_seed(0)
        host = GPTHost(**{**SMALL_GPT, "channels": 64, **changes})
        return host.segments[0][1].branch_ends()[0].weight.std().item() / 0.02

    assert scale() == pytest.approx(8**-0.5, rel=0.05)  # 4 layers with two branches each
    assert scale(mlp=False) == pytest.approx(0.5, rel=0.05)
    assert scale(heads=0) == pytest.approx(0.5, rel=0.05)


def test_a_gpt_is_causal_and_ties_its_output_layer() -> None:
    host = GPTHost(**SMALL_GPT).eval()
    tokens = example(host)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 40
    assert torch.equal(host(tokens)[:, :5], host(changed)[:, :5])
    assert not torch.equal(host(tokens)[:, 5:], host(changed)[:, 5:])
    assert host.segments[-1][1].weight is host.segments[0][0].tokens.weight


def test_a_gpt_without_heads_uses_only_the_token_and_its_position() -> None:
    host = GPTHost(**{**SMALL_GPT, "heads": 0}).eval()
    tokens = example(host)
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 40
    others = torch.arange(8) != 3
    assert torch.equal(host(tokens)[:, others], host(changed)[:, others])
    assert not torch.equal(host(tokens)[:, 3], host(changed)[:, 3])


def test_a_new_gpt_predicts_every_token_about_equally() -> None:
    torch.manual_seed(0)
    host = GPTHost(**SMALL_GPT).eval()
    tokens = example(host)
    loss = nn.functional.cross_entropy(host(tokens).flatten(0, 1), (tokens.flatten() + 20) % 40)
    assert loss.item() == pytest.approx(torch.tensor(40.0).log().item(), abs=0.1)


def test_dropout_draws_from_its_generator_only() -> None:
    host = GPTHost(**SMALL_GPT).train()

    def run(rng_seed: int) -> Tensor:
        host.use_generator(torch.Generator().manual_seed(rng_seed))
        return host(example(host))

    state = torch.get_rng_state()
    first = run(1)
    assert torch.equal(first, run(1))
    assert not torch.equal(first, run(2))
    assert torch.equal(state, torch.get_rng_state())


def test_dropout_keeps_the_mean_and_is_off_in_evaluation() -> None:
    dropout, x = Dropout(0.25), torch.ones(100_000)
    dropout.generator = torch.Generator().manual_seed(0)
    assert dropout(x).mean().item() == pytest.approx(1, abs=0.01)
    assert (dropout(x) == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert dropout.eval()(x) is x


def test_an_unknown_slot_and_a_stop_before_the_start_are_refused() -> None:
    host = CNNHost(**SMALL_CNN)
    with pytest.raises(ValueError, match=r"slot=r0c0: CNNHost has no such slot; it has block1, pool1"):
        host.run(example(host), stop="r0c0")
    with pytest.raises(ValueError, match="stop=block1: must not be before start=block2"):
        host.run(example(host), start="block2", stop="block1")


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        (CNNHost, {"blocks": 0}, r"host\.blocks=0: must be at least 1"),
        (CNNHost, {"kernel": 2}, r"host\.kernel=2: must be odd and at least 1"),
        (CNNHost, {"pools": -1}, r"host\.pools=-1: must be at least 0"),
        (CNNHost, {"shrink": 5}, r"host\.shrink=5: must divide host\.resolution=16"),
        (CNNHost, {"pools": 3, "resolution": 4}, r"host\.pools=3: must be at most 2 for images of 4 pixels"),
        (CNNHost, {"channels": 0}, r"host\.channels=0: must be at least 1"),
        (CNNHost, {"classes": 0}, r"host\.classes=0: must be at least 1"),
        (CNNHost, {"activation": "gelu"}, r"host\.activation=gelu: must be one of relu, none, sigmoid, tanh\.$"),
        (CNNHost, {"waist": 0}, r"host\.waist=0: must be from 1 to 8, the channels of the middle block, or null\.$"),
        (CNNHost, {"waist": 9}, r"host\.waist=9: must be from 1 to 8"),
        (CNNHost, {"waist": 2, "mixing": False}, r"host\.waist=2: must be null with host\.mixing=false"),
        (GPTHost, {"heads": -2}, r"host\.heads=-2: must divide host\.channels=16, or be 0"),
        (GPTHost, {"layers": -3}, r"host\.layers=-3: must be at least 1"),
        (GPTHost, {"heads": 3}, r"host\.heads=3: must divide host\.channels=16"),
        (GPTHost, {"segments": 3}, r"host\.segments=3: must divide host\.layers=4"),
        (GPTHost, {"heads": 0, "mlp": False}, r"host\.mlp=false: must be true with host\.heads=0"),
        (GPTHost, {"dropout": 1.0}, r"host\.dropout=1\.0: must be at least 0 and below 1"),
    ],
)
def test_an_invalid_host_is_refused_in_one_sentence(
    kind: type[Host], changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind(**{**(SMALL_CNN if kind is CNNHost else SMALL_GPT), **changes})


def test_a_text_longer_than_the_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"host\.block_size=8: must be at least the 9 tokens of the text"):
        GPTHost(**SMALL_GPT)(torch.zeros(1, 9, dtype=torch.long))
