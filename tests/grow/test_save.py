"""Seeds are saved alone and put on a fresh network."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import esper
from esper.blueprints import registry
from esper.grow.grower import Grower
from tests.grow.fixtures_networks import ResNet, images, run_loop


def grown(controller: object = "fragrow", **arguments: Any) -> ResNet:
    torch.manual_seed(0)
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    grower = Grower(model, optimizer, example=images(), steps=6, controller=controller, **arguments)
    run_loop(model, optimizer, grower, range(6))
    return model.eval()


def base_of(model: nn.Module) -> ResNet:
    """A network with the weights of another one, without its seeds."""
    base = ResNet()
    base.load_state_dict({name: value for name, value in model.state_dict().items() if "seed" not in name})
    return base.eval()


def test_additions_are_put_on_a_fresh_base(tmp_path: Path) -> None:
    model = grown()
    base = base_of(model)
    place = esper.save(model, tmp_path / "additions")
    assert {path.name for path in place.iterdir()} <= {"esper.json", "seeds.pt", "seeds.safetensors"}
    assert esper.load(base, place) is base
    assert torch.equal(base(images()[0]), model(images()[0]))
    assert sum(path.stat().st_size for path in place.iterdir()) < 40_000


def test_a_network_without_seeds_has_no_additions(tmp_path: Path) -> None:
    esper.save(ResNet(), tmp_path)
    base = ResNet()
    esper.load(base, tmp_path)
    assert json.loads((tmp_path / "esper.json").read_text())["slots"] == []


def test_another_base_a_missing_file_and_another_version_are_refused(tmp_path: Path) -> None:
    esper.save(grown(), tmp_path)
    with pytest.raises(ValueError, match="belongs to another network; names or shapes of the parameters of ResNet"):
        esper.load(ResNet(16), tmp_path)
    with pytest.raises(ValueError, match=r"must be a directory of esper.save, but has no esper.json"):
        esper.load(ResNet(), tmp_path / "none")
    index = json.loads((tmp_path / "esper.json").read_text())
    (tmp_path / "esper.json").write_text(json.dumps({**index, "version": 9}))
    with pytest.raises(ValueError, match="has version 9; this esper reads version 1"):
        esper.load(ResNet(), tmp_path)
    (tmp_path / "esper.json").write_text(json.dumps(index))
    (tmp_path / index["weights"]).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is not readable"):
        esper.load(ResNet(), tmp_path)


def test_a_blueprint_of_ones_own_is_planted_saved_and_merged(tmp_path: Path) -> None:
    @esper.blueprint("test_scale", topology="cnn", kinds=["gating"])
    class Scale(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(channels, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 1e9:  # torch.fx cannot trace this
                return x
            return x * self.scale

    try:
        assert registry.blueprint("cnn", "test_scale").parameters(16) == 16
        model = grown(blueprints=["test_scale"], slots=["layer2"])
        base = base_of(model)
        esper.save(model, tmp_path)
        assert torch.equal(esper.load(base, tmp_path)(images()[0]), model(images()[0]))
        merged = esper.merge(model)
        assert torch.equal(merged(images()[0]), model(images()[0]))
        assert any(isinstance(module, Scale) for module in merged.modules())
    finally:
        del registry._REGISTRY["cnn"]["test_scale"]
