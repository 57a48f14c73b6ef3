"""Growers of a small network, and a controller that follows a list."""

from typing import Any

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from esper.controllers import ReplayController
from esper.grow.grower import Grower
from esper.lifecycle import ActionSpace
from tests.grow.fixtures_networks import ResNet, images

GROW = {"op": "GERMINATE", "slot": "layer2", "blueprint": "conv_small"}
WAIT = {"op": "WAIT"}


def replay(*actions: dict[str, str]) -> Any:
    """A controller that takes these actions and then waits."""

    def build(space: ActionSpace) -> ReplayController:
        return ReplayController(space, actions)

    return build


def make_grower(
    steps: int = 6, kind: type[torch.optim.Optimizer] = SGD, **arguments: Any
) -> tuple[ResNet, Any, Any, Grower]:
    """A network, its optimizer, a scheduler and its Grower."""
    torch.manual_seed(0)
    model = ResNet()
    options: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {}
    optimizer = kind(model.parameters(), lr=0.05, **options)
    schedule = CosineAnnealingLR(optimizer, steps)
    return (
        model,
        optimizer,
        schedule,
        Grower(model, optimizer, example=images(), steps=steps, schedulers=schedule, **arguments),
    )
