"""Descriptors: numbers that describe slots and blueprints, so that a policy needs no index of either."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.blueprints import KINDS, Blueprint

LOG_SCALE = 3.0  # ln of a factor of 20 is 3
LOG_BOUND = 2.0
CANDIDATE_COLUMNS = ("parameters", "flops", *(f"kind={kind}" for kind in KINDS), "reach")


@dataclass(frozen=True)
class Descriptors:
    """What the slots of each environment are like, and the blueprints in each of them; constant in an episode."""

    depth: Tensor  # [envs, slots], position of the slot in the host, above 0 and below 1
    channels: Tensor  # [envs, slots], number of channels
    resolution: Tensor  # [envs, slots], positions (pixels or tokens) at the slot, relative to the input
    cost: Tensor  # [envs, slots], share of the host's FLOPs that is spent between the slot before and this one
    candidates: Tensor  # [envs, slots, blueprints, CANDIDATE_COLUMNS]

    @classmethod
    def stack(cls, rows: Sequence["Descriptors"]) -> "Descriptors":
        """One environment after the other."""
        return cls(**{name: torch.cat([getattr(row, name) for row in rows]) for name in vars(rows[0])})


def describe_candidate(parameters: float, flops: float, kinds: Sequence[str], reach: float) -> list[float]:
    """The columns of one blueprint in one slot.

    Arguments:
        parameters, flops: of the seed, relative to the host
        kinds, reach: of the blueprint
    """
    return [_log(parameters), _log(flops), *(float(kind in kinds) for kind in KINDS), 1 - 1 / (1 + reach)]


def describe_host(
    slots: Sequence[str],
    known: Mapping[str, "SlotShape"],
    blueprints: Mapping[str, Blueprint],
    relative: Mapping[tuple[str, str], tuple[float, float]],
) -> Descriptors:
    """The descriptors of one environment; slots that its host does not have are all 0.

    Arguments:
        slots: names of all columns
        known: the slots that the host has
        blueprints: by name, in the order of the action space
        relative: parameters and FLOPs relative to the host, by slot and blueprint
    """
    missing = SlotShape(0.0, 0.0, 0.0, 0.0)
    shapes = torch.tensor([list(vars(known.get(slot, missing)).values()) for slot in slots]).T
    nothing = [0.0] * len(CANDIDATE_COLUMNS)
    candidates = [
        [
            describe_candidate(*relative[slot, name], entry.kinds, entry.reach) if slot in known else nothing
            for name, entry in blueprints.items()
        ]
        for slot in slots
    ]
    depth, channels, resolution, cost = shapes.unsqueeze(1)
    return Descriptors(depth, channels, resolution, cost, torch.tensor(candidates).unsqueeze(0))


@dataclass(frozen=True)
class SlotShape:
    """The descriptors of one slot; see `Descriptors`."""

    depth: float
    channels: float
    resolution: float
    cost: float


def _log(ratio: float) -> float:
    """ln of a ratio, scaled and clipped."""
    return max(-LOG_BOUND, min(LOG_BOUND, math.log(max(ratio, 1e-9)) / LOG_SCALE))
