"""Decisions without a network: actions of trained controllers, and limits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from esper.controllers import PRETRAINED, Policy, read_controller
from esper.grow.grower import Grower
from esper.lifecycle import FEW_HEADS, PLAIN_OPTIONS, ActionSpace
from esper.observation import FEATURE_SETS, make_layout
from tests.grow.fixtures_networks import ResNet, images, run_loop

LEAN: dict[str, Any] = {"ops": ["WAIT", "GERMINATE", "PRUNE"], "heads": FEW_HEADS, "fixed": PLAIN_OPTIONS}


def save_policy(path: Path, prefer: str) -> str:
    """A controller that may act in all slots at once, and almost always takes one op."""
    space = ActionSpace(slots=["x", "y"], blueprints=["norm", "conv_small"], all_slots=True, **LEAN)
    layout = make_layout(space, FEATURE_SETS["scale_free"])
    settings = dict(read_controller("pretrained").settings)
    torch.manual_seed(0)
    policy = Policy(layout, **settings)
    with torch.no_grad():
        policy.heads["op"][2].bias.copy_(torch.tensor([9.0 * (op == prefer) for op in layout.ops]))  # type: ignore[index]
        policy.all_slots.bias.fill_(20.0)  # type: ignore[union-attr]
    content = torch.load(PRETRAINED["pretrained"], weights_only=True)
    content["esper"]["layout"] = layout.to_dict()
    content["esper"]["training"]["config"]["actions"] = {"fixed": PLAIN_OPTIONS}
    content["state_dict"] = {f"policy.{name}": value for name, value in policy.state_dict().items()}
    torch.save(content, path)
    return str(path)


def grow(controller: str, **arguments: Any) -> Grower:
    torch.manual_seed(0)
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.05)
    grower = Grower(model, optimizer, example=images(), steps=4, controller=controller, **arguments)
    run_loop(model, optimizer, grower, range(4))
    return grower


def test_a_controller_may_plant_in_all_slots_at_once(tmp_path: Path) -> None:
    grower = grow(save_policy(tmp_path / "lean.pt", "GERMINATE"))
    first = next(record for record in grower.history if record["op"] == "GERMINATE")
    assert first["slot"] == "all"
    assert len(first["events"]) == 3
    assert {record["stage"] for record in grower.summary()} == {"FOSSILIZED"}


@pytest.mark.parametrize("limit", [1.02, 1.1])
def test_planting_everywhere_keeps_to_the_limit(tmp_path: Path, limit: float) -> None:
    grower = grow(save_policy(tmp_path / "lean.pt", "GERMINATE"), max_parameters=limit)
    bare = sum(p.numel() for p in ResNet().parameters())
    assert max(record["parameters"] for record in grower.history) <= limit * bare


def test_blueprints_that_a_controller_never_saw_can_be_planted(tmp_path: Path) -> None:
    grower = grow(save_policy(tmp_path / "lean.pt", "GERMINATE"), blueprints=["spatial"])
    assert {record["blueprint"] for record in grower.summary()} == {"spatial"}
