"""A merged network is an ordinary module."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import esper
from esper.blueprints import blueprints
from esper.grow.grower import Grower
from esper.growth import HookedSlot, Mode, attach_slots, find_hooked_slots
from esper.lifecycle import Blend
from tests.grow.fixtures_networks import ResNet, TextNet, images, run_loop, tokens

CPU = torch.device("cpu")
WITHOUT_ESPER = """
import sys, torch
sys.modules["esper"] = None
sys.modules["tests"] = None
torch.set_num_threads(1)  # as in the tests; sums depend on it
x, y = torch.load(sys.argv[1], weights_only=True)
network = torch.load(sys.argv[2], weights_only=False)
exported = torch.export.load(sys.argv[3]).module()
assert torch.equal(network(x), y), "pickled"
assert torch.equal(exported(x), y), "exported"
"""


def with_seed(model: nn.Module, name: str, topology: str, blueprint: str, blend: Blend, alpha: float = 1.0) -> None:
    """Put a seed that is not the identity behind a module."""
    table = esper.slots(model, tokens() if topology == "transformer" else images(), slots=[name], causal=True)
    info = table[0]
    slot = HookedSlot(name, topology=topology, channels=info.channels, output=info.output, keywords=info.keywords)
    attach_slots(model, [slot])
    seed = slot.graft(blueprint, blend, rng_seed=1, device=CPU)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.add_(torch.full_like(parameter, 0.05))
    slot.set(Mode.BLENDED, alpha)
    model.eval()


@pytest.mark.parametrize("blend", list(Blend))
@pytest.mark.parametrize("alpha", [0.4, 1.0])
@pytest.mark.parametrize(
    ("topology", "name"), [(topology, name) for topology in ("cnn", "transformer") for name in blueprints(topology)]
)
def test_outputs_are_bit_equal_for_every_blueprint_and_blend(
    topology: str, name: str, blend: Blend, alpha: float
) -> None:
    torch.manual_seed(0)
    model, x = (ResNet(), images()[0]) if topology == "cnn" else (TextNet(), tokens())
    with_seed(model, "layer2" if topology == "cnn" else "h.1", topology, name, blend, alpha)
    merged = esper.merge(model)
    assert torch.equal(merged(x), model(x))
    with esper.disabled(model):
        assert not torch.equal(merged(x), model(x))
    assert not any(type(module).__module__.startswith("esper") for module in merged.modules())
    assert not find_hooked_slots(merged)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "named", "dataclass"])
def test_any_form_of_output_and_keyword_arguments_are_kept(kind: str) -> None:
    torch.manual_seed(0)
    model = TextNet(kind)
    with_seed(model, "h.1", "transformer", "mlp_small", Blend.ADD)
    merged = esper.merge(model)
    assert torch.equal(merged(tokens()), model(tokens()))
    x = torch.randn(2, 3, 8)
    before, after = model.h[1](x, None, scale=0.3), merged.h[1](x, None, scale=0.3)  # type: ignore[operator,index]
    assert type(before) is type(after)


class Flexible(nn.Module):
    """A network whose block takes further keyword arguments, as those of Hugging Face do."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, bias: float = 0.0, **more: Any) -> tuple[torch.Tensor, Any]:
            return self.layer(x) * more["scale"] + bias, more.get("cache")

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(11, 8), self.Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(self.embed(ids), bias=0.1, scale=2.0, cache=None)[0]
        return out


def test_further_keyword_arguments_of_the_example_are_kept() -> None:
    torch.manual_seed(0)
    model = Flexible()
    with_seed(model, "block", "transformer", "mlp_small", Blend.ADD)
    assert torch.equal(esper.merge(model)(tokens()), model(tokens()))


def test_a_merged_network_is_bit_equal_in_half_precision() -> None:
    torch.manual_seed(0)
    model = ResNet()
    with_seed(model, "layer2", "cnn", "depthwise", Blend.GATED, 0.7)
    merged = esper.merge(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(merged(images()[0]), model(images()[0]))


def test_a_sequential_slot_keeps_the_names_of_its_parameters() -> None:
    model = ResNet()
    names = [name for name, _ in model.named_parameters()]
    with_seed(model, "layer1", "cnn", "conv_small", Blend.ADD)
    merged = esper.merge(model)
    assert set(names) <= {name for name, _ in merged.named_parameters()}


def test_a_merged_network_trains_as_the_grown_one_does() -> None:
    torch.manual_seed(0)
    model = ResNet()
    with_seed(model, "layer1", "cnn", "depthwise", Blend.ADD)
    merged = esper.merge(model)
    for each in (model, merged):
        torch.manual_seed(1)
        each.train()(images()[0]).square().mean().backward()
    assert torch.equal(model.stem.weight.grad, merged.stem.weight.grad)  # type: ignore[union-attr,arg-type]


def test_the_grown_network_is_left_alone_unless_it_is_merged_in_place() -> None:
    model = ResNet()
    with_seed(model, "layer1", "cnn", "conv_small", Blend.ADD)
    before = list(model.state_dict())
    esper.merge(model)
    assert list(model.state_dict()) == before
    out = model(images()[0])
    assert esper.merge(model, inplace=True) is model
    assert torch.equal(model(images()[0]), out)
    assert not find_hooked_slots(model)


def test_isolated_seeds_are_left_out() -> None:
    model = ResNet()
    with_seed(model, "layer1", "cnn", "conv_small", Blend.ADD)
    find_hooked_slots(model)["layer1"].set(Mode.ISOLATED, 1.0)
    assert [name for name, _ in esper.merge(model).named_parameters()] == [n for n, _ in ResNet().named_parameters()]


def test_a_merged_network_loads_where_esper_is_not_installed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1), nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU()), nn.Conv2d(8, 4, 1), nn.Flatten()
    )
    optimizer = SGD(model.parameters(), lr=0.05)
    arguments: dict[str, Any] = {"slots": ["0", "1"], "controller": "fragrow", "example": images(), "steps": 5}
    grower = Grower(model, optimizer, **arguments, chance_loss=1.0)
    run_loop(model, optimizer, grower, range(5), evaluate=False)
    assert len(grower.summary()) == 2
    merged = esper.merge(model.eval())
    x = images()[0]
    torch.save((x, copy.deepcopy(model)(x).detach()), tmp_path / "data.pt")
    torch.save(merged, tmp_path / "network.pt")
    torch.export.save(torch.export.export(merged, (x,)), tmp_path / "network.pt2")
    files = [str(tmp_path / name) for name in ("data.pt", "network.pt", "network.pt2")]
    subprocess.run([sys.executable, "-c", WITHOUT_ESPER, *files], check=True, cwd=tmp_path)
