"""The rules of a run: what a seed needs to leave a stage, and when a slot may be used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import AllowInfNan
from torch import Tensor

from esper.lifecycle.slots import Slots
from esper.lifecycle.stages import NEXT, Stage

GATED = (*NEXT, Stage.HOLDING)  # stages that a seed leaves through a gate


@dataclass(frozen=True)
class Gate:
    """What a seed needs before it leaves a stage; a value that was never measured does not pass.

    Arguments:
        dwell: minimum number of steps in the stage; None is a tenth of the episode
        full_alpha: alpha must be 1, at the end of its ramp
        health: minimum health; None is no requirement
        contribution: minimum contribution; -inf requires only that it was measured, None is no requirement
    """

    dwell: int | None = None
    full_alpha: bool = False
    health: float | None = None
    contribution: Annotated[float, AllowInfNan()] | None = None

    def __post_init__(self) -> None:
        for key, value in (("health", self.health), ("contribution", self.contribution)):
            if value is not None and math.isnan(value):
                raise ValueError(f"lifecycle.gates: {key}=nan: must be a number, or null for no requirement.")


class Rules:
    """Gates and durations of a run.

    Arguments:
        steps: steps in an episode; a duration of None becomes max(1, steps // 10)
        gates: gate by stage, with the stage's name in lower case; one for each of GATED
        prune_age: steps after germination before a seed may be pruned
        cooldown: steps before the slot of a pruned seed is free again
        max_live: maximum number of live seeds in an environment; None is no limit
        commit: what becomes of live seeds in the last step. explicit: they are lost. auto: `commit` fossilises those
            that are fully blended in and healthy
        ramp: steps until a new seed is fully blended in, independent of the tempo of the action; 0 and 1 are at once.
            None is the tempo of the action
    """

    def __init__(
        self,
        *,
        steps: int,
        gates: Mapping[str, Gate],
        prune_age: int | None,
        cooldown: int | None,
        max_live: int | None,
        commit: Literal["explicit", "auto"] = "explicit",
        ramp: int | None = None,
    ) -> None:
        if steps < 1:
            raise ValueError(f"environment.steps={steps}: must be at least 1.")
        expected = [stage.name.lower() for stage in GATED]
        if sorted(gates) != sorted(expected):
            raise ValueError(f"lifecycle.gates={sorted(gates)}: must have exactly the keys {', '.join(expected)}.")
        default = max(1, steps // 10)
        self.gates: dict[Stage, Gate] = {Stage[name.upper()]: gate for name, gate in gates.items()}
        self.dwell: dict[Stage, int] = {
            stage: _resolve_duration(f"lifecycle.gates.{stage.name.lower()}.dwell", gate.dwell, default)
            for stage, gate in self.gates.items()
        }
        self.prune_age: int = _resolve_duration("lifecycle.prune_age", prune_age, default)
        self.cooldown: int = _resolve_duration("lifecycle.cooldown", cooldown, default)
        if max_live is not None and max_live < 1:
            raise ValueError(f"lifecycle.max_live={max_live}: must be at least 1, or null for no limit.")
        self.max_live: int | None = max_live
        self.commit: Literal["explicit", "auto"] = commit
        if ramp is not None and ramp < 0:
            raise ValueError(f"lifecycle.ramp={ramp}: must be at least 0, or null for the tempo of the action.")
        self.ramp: int | None = ramp


def _resolve_duration(key: str, value: int | None, default: int) -> int:
    if value is not None and value < 0:
        raise ValueError(f"{key}={value}: must be at least 0, or null for {default} (a tenth of the episode).")
    return default if value is None else value


def gates(slots: Slots, rules: Rules) -> dict[str, Tensor]:
    """Whether each slot's seed meets each criterion of its gate: bool [envs, slots] by criterion.

    A criterion that the gate does not have is met. The result has no meaning for slots that are not in a gated stage.
    """
    result = {name: torch.ones_like(slots.moving) for name in ("dwell", "alpha", "health", "contribution")}
    for stage, gate in rules.gates.items():
        in_stage = slots.stage == stage
        result["dwell"] &= ~in_stage | (slots.steps_in_stage >= rules.dwell[stage])
        if gate.full_alpha:
            result["alpha"] &= ~in_stage | ((slots.alpha == 1) & ~slots.moving)
        if gate.health is not None:
            result["health"] &= ~in_stage | (slots.health >= gate.health)
        if gate.contribution is not None:
            result["contribution"] &= ~in_stage | (slots.contribution >= gate.contribution)
    return result


def passes_gate(slots: Slots, rules: Rules) -> Tensor:
    """Whether each slot's seed is in a gated stage and meets all criteria of its gate: bool [envs, slots]."""
    passed = slots.in_stage(GATED) & ~slots.blending_out
    for criterion in gates(slots, rules).values():
        passed = passed & criterion
    return passed
