"""The clock of a round: plans and charges each step of each run, and what controllers see of it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from esper.environment.accounting import CostAccounting
from esper.environment.clock import Clock
from esper.environment.host_run import StepPlan
from esper.environment.record import StepRecord
from esper.environment.run_changes import RunChanges
from esper.environment.start import EpisodeStart
from esper.growth import LRSchedule
from esper.lifecycle import Slots, Stage
from esper.observation import ClockView


class RoundClock:
    """Plans the steps of a round's episodes, and charges them.

    Arguments:
        clock: decides how much a step trains and measures
        starts: how each episode starts
        steps: decisions in an episode
        accounting: what each episode has spent
        changes: knows whether a measurement could have changed
        schedule: of the learning rates; None is a constant
    """

    def __init__(
        self,
        clock: Clock,
        starts: Sequence[EpisodeStart],
        steps: int,
        accounting: CostAccounting,
        changes: RunChanges,
        schedule: LRSchedule | None,
    ) -> None:
        self._clock, self._starts, self._steps, self._schedule = clock, starts, steps, schedule
        self._accounting, self._changes = accounting, changes
        tasks = accounting.tasks
        self._sizes = [task.data.size("validation") for task in tasks]
        bare = [accounting.bare_batch_flops(env) for env in range(len(starts))]
        self._budgets = [
            clock.budget(cost, steps, start, task.budget_batches)
            for cost, start, task in zip(bare, starts, tasks, strict=True)
        ]
        passes = [cost * task.data.size("train") / task.batch for cost, task in zip(bare, tasks, strict=True)]
        self._passes = torch.tensor([budget / one for budget, one in zip(self._budgets, passes, strict=True)])
        self._chance = torch.tensor([math.log(task.data.options) for task in tasks])

    @property
    def measured_from_start(self) -> Tensor:
        """Which episodes are measured before their last step: bool [envs]."""
        return torch.tensor([start.measured or not self._clock.is_budgeted for start in self._starts])

    def samples(self, env: int, is_final: bool) -> int:
        """Samples of the validation split in a measurement."""
        return self._sizes[env] if is_final else self._clock.samples(self._sizes[env])

    def plan(self, env: int, outline: StepPlan, during: Slots, step: int) -> StepPlan:
        """The plan of a run's next step, which is charged; `outline` has the settings of its seeds."""
        start, accounting = self._starts[env], self._accounting
        accounting.charge_controller(env, start.controller_flops)
        samples = self._clock.samples(self._sizes[env])
        read = partial(accounting.spending, env, outline, during, self._budgets[env], samples)
        size = self._clock.step_size(step, self._steps, start, read)
        how = (outline.final, outline.off, size.samples)
        measure = size.measure and self._changes.must_measure(env, size.batches, how)
        plan = replace(outline, batches=size.batches, progress=size.progress, measure=measure, samples=size.samples)
        accounting.charge_step(env, plan, during, measurement=size.charge)
        return plan

    def first_view(self, slots: Slots, loss: Tensor) -> ClockView:
        """What controllers see before the first step; `loss` [envs] is NaN where it was not measured."""
        start = torch.where(slots.occupied, 0.0, torch.nan)
        return self._read(0, slots, start, loss, ~loss.isnan())

    def next_view(self, record: StepRecord, measured: Tensor) -> ClockView:
        """What controllers see after a step; `measured`, bool [envs], is whether it ended with a measurement."""
        old = self._latest
        start = old.next_start(record.entered[..., Stage.GERMINATED], record.after.occupied)
        first_loss = torch.where(old.first_loss.isnan(), record.now.loss, old.first_loss)
        return self._read(record.step + 1, record.after, start, first_loss, measured)

    def _read(self, step: int, slots: Slots, start: Tensor, first_loss: Tensor, fresh: Tensor) -> ClockView:
        total = self._accounting.total_flops.tolist()
        spent = [self._clock.progress(step, self._steps, *each) for each in zip(total, self._budgets, strict=True)]
        left = [1 - share if self._schedule is None else self._schedule.mass_left(share) for share in spent]
        cost, seed_cost = self._accounting.relative_costs(slots)
        self._latest = ClockView(
            spent=torch.tensor(spent),
            lr_left=torch.tensor(left),
            passes=self._passes,
            cost=cost,
            seed_cost=seed_cost,
            start=start,
            first_loss=first_loss,
            chance_loss=self._chance,
            fresh=fresh,
        )
        return self._latest
