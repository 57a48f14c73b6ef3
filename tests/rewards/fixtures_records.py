"""Step records with chosen values: one environment, three slots."""

from dataclasses import replace

import torch
from torch import Tensor

from esper.environment import StepRecord
from esper.lifecycle import ActionSpace, Slots, Stage, acted_slots
from esper.observation import HostMeasurements
from tests.lifecycle.fixtures_slots import act, quick, space

FIRST_SLOT = torch.tensor([[True, False, False]])


def measured(envs: int = 1, slots: int = 3, **values: float | Tensor) -> HostMeasurements:
    """Measurements with default values; those of slots are NaN."""
    by_slot = {"contribution", "loss_contribution", "progress", "seed_gradient_norm", "seed_health", "isolated_gain"}
    result = {}
    for name in HostMeasurements.__dataclass_fields__:
        shape = (envs, slots) if name in by_slot else (envs,)
        default = torch.full(shape, torch.nan if name in by_slot else 1000.0 if name == "parameters" else 1.0)
        value = values.get(name, default)
        result[name] = value if isinstance(value, Tensor) else torch.full(shape, float(value))
    return HostMeasurements(**result)


def seed(stage: Stage, **values: float) -> Slots:
    """Three slots with a seed in the first."""
    return Slots.empty(1, 3).where(FIRST_SLOT, stage=stage, **values)


def record(
    *,
    step: int = 0,
    steps: int = 10,
    action: dict[str, str] | None = None,
    before: Slots | None = None,
    after: Slots | None = None,
    earlier: HostMeasurements | None = None,
    now: HostMeasurements | None = None,
    entered: dict[Stage, Tensor] | None = None,
    rollback: int = 0,
    is_last: bool = False,
    action_space: ActionSpace | None = None,
) -> StepRecord:
    action_space = action_space or space("core")
    before = before or Slots.empty(1, 3)
    flags = torch.zeros(1, 3, len(Stage), dtype=torch.bool)
    for stage, where in (entered or {}).items():
        flags[..., stage] = where
    decision = action_space.decode(act(action_space, action or {"op": "WAIT"}))
    return StepRecord(
        step=step,
        steps=steps,
        decision=decision,
        acted=acted_slots(before, decision, action_space, quick()),
        before=before,
        during=before,
        after=after or before,
        entered=flags,
        earlier=earlier or measured(),
        now=now or measured(),
        initial_score=torch.tensor([10.0]),
        host_parameters=torch.tensor([1000.0]),
        seed_parameters=torch.zeros(1, 3),
        batches=torch.tensor([16]),
        rollback=torch.tensor([rollback]),
        terminated=torch.tensor([is_last]),
        truncated=torch.tensor([False]),
    )


def on_slot(value: float) -> Tensor:
    return torch.tensor([[value, torch.nan, torch.nan]])


def with_seed_parameters(base: StepRecord, count: float) -> StepRecord:
    return replace(base, seed_parameters=torch.tensor([[count, 0.0, 0.0]]))
