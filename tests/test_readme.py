import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esper.blueprints import registry
from esper.config import build, compose_config
from esper.growth import GrowingHost, export, find_hooked_slots
from esper.hosts import count_parameters
from tests.fixtures_examples import PROJECT, load_script, small_images

PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]
CODE = [code for page in PAGES for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
GROWS = re.compile(r"^import esper$", re.MULTILINE)  # in code for networks of the user's own


def save_grown_network(path: Path) -> None:
    """A network as an evaluation saves it."""
    path.parent.mkdir(parents=True)
    host = build(compose_config("evaluate", ["host=cifar_blind"]).host)
    arguments = {"blocks": 3, "channels": 16, "kernel": 1, "pools": 3, "pool_slots": False}
    described = {"target": "esper.hosts.CNNHost", "arguments": {**arguments, "resolution": 32, "classes": 10}}
    export(path, GrowingHost(host, coadapt=True), {}, host=described, about={"data": {"resolution": 32}})


def training_script() -> dict[str, Any]:
    """What a training script has before growth is added to it: a network, data, and functions that use them."""
    example, data = load_script("grow_your_own"), small_images()
    parts = [TensorDataset(*next(data.batches(part, data.size(part)))) for part in ("train", "validation")]
    train_loader, val_loader = DataLoader(parts[0], 64), DataLoader(parts[1], 64)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        total = 0.0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / len(train_loader)

    @torch.no_grad()
    def validate(model: nn.Module) -> tuple[float, float]:
        x, y = next(iter(val_loader))
        out = model(x)
        return F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()

    names = {"model": example.ResNet(epochs=4), "batch": next(iter(train_loader)), "train": train, "validate": validate}
    return names | {"train_loader": train_loader, "val_loader": val_loader}


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("code", [code for code in CODE if GROWS.search(code)])
def test_the_python_that_grows_a_network_runs_in_a_training_script(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTRY", {name: dict(family) for name, family in registry._REGISTRY.items()})
    names = training_script()
    exec(code, names)
    if "grow" in names:
        assert len(names["grow"].history) == 4
        assert (
            find_hooked_slots(names["merged"] if "merged" in names else torch.load("grown.pt", weights_only=False))
            == {}
        )
    elif "grower" in names:
        assert len(names["grower"].history) == 4
    elif "merged" in names:
        assert find_hooked_slots(names["merged"]) == {}
        assert type(names["grown"]) is type(names["model"])
    elif "ChannelScale" in names:
        assert registry.blueprint("cnn", "channel_scale").parameters(16) == 16


@pytest.mark.parametrize("code", [code for code in CODE if not GROWS.search(code)])
def test_the_python_in_readme_and_docs_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_grown_network(Path("outputs/evaluate/DATE_TIME/grown_57.pt"))
    names: dict[str, object] = {}
    exec(code, names)
    if "model" in names:
        assert names["isolated"] == {}  # the seed ended blended
        assert count_parameters(names["model"]) == 3_482 + 9_280
    elif "network" in names:
        assert count_parameters(names["network"]) == 3_482
    elif "variant" in names:
        assert names["variant"].size("train") == 600  # type: ignore[attr-defined]
    elif "PlantEverywhere" in names:
        agent = names["PlantEverywhere"](["WAIT", "GERMINATE all depthwise"])  # type: ignore[operator]
        assert (agent.act({}, {"action_mask": [1, 1]}), agent.act({}, {"action_mask": [1, 0]})) == (1, 0)
    else:
        assert isinstance(names["reward"], float)
