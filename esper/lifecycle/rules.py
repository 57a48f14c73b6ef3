"""The rules that hold for a run: what a seed must show to leave a stage, and when a slot may be used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle.slots import Slots
from esper.lifecycle.stages import NEXT, Stage

GATED = (*NEXT, Stage.HOLDING)  # the stages that a seed leaves through a gate


@dataclass(frozen=True)
class Gate:
    """What a seed must show before it leaves a stage; None is not demanded. What was never measured fails."""

    dwell: int | None = None  # epochs in the stage; None follows from the episode's length
    full_alpha: bool = False  # alpha rests at 1
    health: float | None = None  # at least
    contribution: float | None = None  # at least; -inf means "measured, whatever it is"

    def __post_init__(self) -> None:
        for key, value in (("health", self.health), ("contribution", self.contribution)):
            if value is not None and math.isnan(value):
                raise ValueError(f"lifecycle.gates: {key}=nan: must be a number, or null for no demand.")


class Rules:
    """Gates and timings of a run.

    Arguments:
        steps: length of an episode; times left at None become max(1, steps // 10)
        gates: for each stage that is left through a gate, by its name in lower case, what the gate demands
        prune_age: epochs after germination before a seed may be pruned
        cooldown: epochs before the slot of a pruned seed is free again
        max_live: how many undecided seeds an environment may have at once; None is no limit
    """

    def __init__(
        self,
        *,
        steps: int,
        gates: Mapping[str, Gate],
        prune_age: int | None,
        cooldown: int | None,
        max_live: int | None,
    ) -> None:
        if steps < 1:
            raise ValueError(f"environment.steps={steps}: must be at least 1.")
        expected = [stage.name.lower() for stage in GATED]
        if sorted(gates) != sorted(expected):
            raise ValueError(f"lifecycle.gates={sorted(gates)}: must be given for exactly {', '.join(expected)}.")
        usual = max(1, steps // 10)
        self.gates: dict[Stage, Gate] = {Stage[name.upper()]: gate for name, gate in gates.items()}
        self.dwell: dict[Stage, int] = {
            stage: _at_least_zero(f"lifecycle.gates.{stage.name.lower()}.dwell", gate.dwell, usual)
            for stage, gate in self.gates.items()
        }
        self.prune_age: int = _at_least_zero("lifecycle.prune_age", prune_age, usual)
        self.cooldown: int = _at_least_zero("lifecycle.cooldown", cooldown, usual)
        if max_live is not None and max_live < 1:
            raise ValueError(f"lifecycle.max_live={max_live}: must be at least 1, or null for no limit.")
        self.max_live: int | None = max_live


def _at_least_zero(key: str, value: int | None, usual: int) -> int:
    if value is not None and value < 0:
        raise ValueError(f"{key}={value}: must be at least 0, or null for {usual} (a tenth of the episode).")
    return usual if value is None else value


def gates(slots: Slots, rules: Rules) -> dict[str, Tensor]:
    """Each criterion of the gate before each slot: bool [envs, slots] by name; true where nothing is demanded.

    Only slots in a gated stage have a gate; elsewhere the answers mean nothing.
    """
    result = {name: torch.ones_like(slots.moving) for name in ("dwell", "alpha", "health", "contribution")}
    for stage, gate in rules.gates.items():
        here = slots.stage == stage
        result["dwell"] &= ~here | (slots.steps_in_stage >= rules.dwell[stage])
        if gate.full_alpha:
            result["alpha"] &= ~here | ((slots.alpha == 1) & ~slots.moving)
        if gate.health is not None:
            result["health"] &= ~here | (slots.health >= gate.health)
        if gate.contribution is not None:
            result["contribution"] &= ~here | (slots.contribution >= gate.contribution)
    return result


def may_leave(slots: Slots, rules: Rules) -> Tensor:
    """Where a seed stands before a gate that lets it pass: bool [envs, slots]."""
    passed = slots.in_stage(GATED) & ~slots.blending_out
    for criterion in gates(slots, rules).values():
        passed = passed & criterion
    return passed
