"""Alpha schedules: five curves from 0 to 1, and ramps along a curve from a start to a target."""

import math
from enum import IntEnum

import torch
from torch import Tensor


class Curve(IntEnum):
    """The shape of a change of alpha."""

    LINEAR = 0
    COSINE = 1
    SIGMOID_GENTLE = 2
    SIGMOID = 3
    SIGMOID_SHARP = 4


STEEPNESS = {Curve.SIGMOID_GENTLE: 6.0, Curve.SIGMOID: 12.0, Curve.SIGMOID_SHARP: 24.0}


def _logistic(t: Tensor, steepness: float) -> Tensor:
    """The logistic curve, scaled so that it passes through (0, 0) and (1, 1)."""
    low = 1 / (1 + math.exp(steepness / 2))
    return (torch.sigmoid(steepness * (t - 0.5)) - low) / (1 - 2 * low)


def curve_progress(curve: Tensor, t: Tensor) -> Tensor:
    """The value of a curve at time `t`: monotone, exactly 0 at t <= 0 and exactly 1 at t >= 1.

    `curve` has Curve values. Both tensors and the float32 result have the same shape.
    """
    t = t.double().clamp(0, 1)  # float64, so that rounding does not break monotonicity
    curves = torch.stack(
        [t, (1 - torch.cos(math.pi * t)) / 2, *(_logistic(t, steepness) for steepness in STEEPNESS.values())]
    )
    values = curves.gather(0, curve.unsqueeze(0)).squeeze(0).clamp(0, 1)
    return torch.where(t >= 1, torch.ones_like(values), torch.where(t <= 0, torch.zeros_like(values), values)).float()


def ramp(start: Tensor, target: Tensor, done: Tensor, ticks: Tensor, curve: Tensor) -> Tensor:
    """Alpha after `done` of `ticks` ticks from `start` to `target`; all tensors have the same shape.

    With zero ticks the result is the target. The last tick reaches the target exactly.
    """
    finished = done >= ticks
    t = torch.where(finished, torch.ones_like(start), done / ticks.clamp(min=1))
    return torch.where(finished, target, torch.lerp(start, target, curve_progress(curve, t)))
