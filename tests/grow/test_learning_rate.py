"""How much of the learning rate a training has left."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch.optim.lr_scheduler as lr
from torch.optim import SGD, Optimizer

from esper.grow.learning_rate import LearningRateMass
from esper.grow.optimizers import SeedGroups
from tests.grow.fixtures_networks import ResNet

STEPS = 20


def masses(build: Callable[[Optimizer], Any]) -> tuple[list[float], list[float]]:
    """What is foreseen and what is true at quarters of a training."""
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = build(optimizer)
    mass = LearningRateMass(SeedGroups(model, [optimizer], [scheduler]))
    rates, foreseen = [], []
    for step in range(1, STEPS + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        if step % 5 == 0:
            foreseen.append(mass.left(step / STEPS))
    return foreseen, [sum(rates[quarter * 5 :]) / sum(rates) for quarter in range(1, 5)]


@pytest.mark.parametrize(
    "build",
    [
        lambda o: lr.CosineAnnealingLR(o, STEPS),
        lambda o: lr.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
        lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=4), lr.CosineAnnealingLR(o, 16)], [4]),
        lambda o: lr.StepLR(o, 7, 0.1),
    ],
)
def test_the_share_that_is_left_is_that_of_the_schedule(build: Callable[[Optimizer], Any]) -> None:
    foreseen, true = masses(build)
    assert foreseen == pytest.approx(true, abs=1e-6)


def test_what_cannot_be_foreseen_is_unknown() -> None:
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert math.isnan(LearningRateMass(SeedGroups(model, [optimizer])).left(0.5))
    plateau = lr.ReduceLROnPlateau(optimizer)
    mass = LearningRateMass(SeedGroups(model, [optimizer], [plateau]))
    optimizer.step()
    plateau.step(1.0)
    assert math.isnan(mass.left(0.5))
