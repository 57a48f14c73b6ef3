"""Clocks: what an episode is measured in, batches or FLOPs, and how much of it one step may spend."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from esper.environment.start import EpisodeStart

FLOPS_PER_GFLOP = 1e9
SLICE_ROUNDING = 1e-9  # relative; a slice that pays for a whole number of batches is not rounded down to one fewer


@dataclass(frozen=True)
class StepSize:
    """How much one run trains and measures in one step."""

    batches: int  # training batches
    progress: tuple[float, float]  # share of the episode before and after these batches; sets the learning rate
    measure: bool  # whether the host is validated after them
    samples: int | None  # of the validation split, from its start; None is the whole split
    charge: bool  # whether the measurement counts as spent


@dataclass(frozen=True)
class Spending:
    """What a run has spent before a step, and what it costs now; all in FLOPs."""

    budget: float  # of the whole episode
    spent: float  # so far
    measured: float  # of that, for validation and probes
    batch: float  # cost of a training batch now
    measurement: float  # cost of a measurement after this step


class Clock(Protocol):
    """Decides how much each step trains and measures."""

    is_budgeted: bool  # whether an episode is measured in FLOPs

    def budget(self, bare_batch: float, steps: int, start: EpisodeStart, batches: float | None = None) -> float:
        """FLOPs of training in an episode.

        Arguments:
            bare_batch: cost of a training batch of the host without seeds
            steps, start: of the episode
            batches: the budget of its task in such batches; None is that of the clock
        """

    def step_size(self, step: int, steps: int, start: EpisodeStart, read: Callable[[], Spending]) -> StepSize:
        """The size of a step; `read` returns what the run has spent before it."""

    def samples(self, size: int) -> int:
        """Validation samples of a measurement before the end of an episode; `size` is that of the split."""

    def progress(self, step: int, steps: int, spent: float, budget: float) -> float:
        """Share of the episode that is over after `step` steps."""


@dataclass(frozen=True)
class BatchClock:
    """The same number of training batches in each step, and a validation of the whole split after it."""

    batches: int
    is_budgeted = False

    def budget(self, bare_batch: float, steps: int, start: EpisodeStart, batches: float | None = None) -> float:
        return bare_batch * (self.batches * steps if start.batches is None else start.batches)

    def step_size(self, step: int, steps: int, start: EpisodeStart, read: Callable[[], Spending]) -> StepSize:
        batches = start.batches_in_step(step, steps, self.batches)
        return StepSize(batches, (step / steps, (step + 1) / steps), True, None, True)

    def samples(self, size: int) -> int:
        return size

    def progress(self, step: int, steps: int, spent: float, budget: float) -> float:
        return step / steps


class BudgetClock:
    """An equal slice of a budget of FLOPs in each step, so a cheap network trains on more batches.

    A slice pays for training, isolated passes, validation, probes and the controller. What it leaves over is added to
    the next slice; one that does not pay for a batch trains nothing. The last slice is spent completely, so an episode
    ends at most one batch above its budget. The last measurement is of the whole split and costs nothing, because
    nothing depends on it.

    Arguments:
        budget: GFLOPs of an episode; None if `budget_batches` is set
        budget_batches: the budget in training batches of the host without seeds; None if `budget` is set
        budget_share: share of this budget that episodes have
        validation_samples: samples of the validation split, from its start, that are measured during an episode
        validation_every: steps between these measurements
        measure_share: largest share of the FLOPs spent so far for validation and probes; a measurement that would
            exceed it is left out
    """

    is_budgeted = True

    def __init__(
        self,
        *,
        budget: float | None,
        budget_batches: float | None,
        budget_share: float = 1.0,
        validation_samples: int,
        validation_every: int,
        measure_share: float,
    ) -> None:
        if (budget is None) == (budget_batches is None):
            raise ValueError(
                f"environment.budget={budget}, environment.budget_batches={budget_batches}: must set exactly one."
            )
        for key, value in (("budget", budget), ("budget_batches", budget_batches)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"environment.{key}={value}: must be above 0.")
        for key, count in (("validation_samples", validation_samples), ("validation_every", validation_every)):
            if count < 1:
                raise ValueError(f"environment.{key}={count}: must be at least 1.")
        if not 0 < budget_share <= 1:
            raise ValueError(f"environment.budget_share={budget_share}: must be above 0 and at most 1.")
        if not 0 <= measure_share < 1:
            raise ValueError(f"environment.measure_share={measure_share}: must be at least 0 and below 1.")
        self._budget, self._budget_batches, self._share = budget, budget_batches, budget_share
        self._samples, self._every, self._measure_share = validation_samples, validation_every, measure_share

    def budget(self, bare_batch: float, steps: int, start: EpisodeStart, batches: float | None = None) -> float:
        in_batches = self._budget_batches if batches is None else batches
        if self._budget is not None and batches is None:
            whole = self._budget * FLOPS_PER_GFLOP
        else:
            assert in_batches is not None
            whole = bare_batch * in_batches
        return whole * self._share * start.budget

    def check(self, host: str, bare_batch: float, batches: float | None = None) -> None:
        """Refuse a budget that does not pay for one training batch of a host without seeds."""
        if self.budget(bare_batch, 1, EpisodeStart(), batches) >= bare_batch:
            return
        if batches is not None:
            bought = batches * self._share
            raise ValueError(f"tasks: the budget of {host} is {bought:g} training batches; must be at least 1.")
        key, value = ("budget", self._budget) if self._budget is not None else ("budget_batches", self._budget_batches)
        least = f"{bare_batch / FLOPS_PER_GFLOP:.3g} GFLOPs" if self._budget is not None else "1"
        raise ValueError(f"environment.{key}={value}: must be at least {least}, one training batch of {host}.")

    def step_size(self, step: int, steps: int, start: EpisodeStart, read: Callable[[], Spending]) -> StepSize:
        spending = read()
        if step + 1 == steps:
            batches = math.ceil((spending.budget - spending.spent) / spending.batch * (1 - SLICE_ROUNDING))
            return self._step_size(batches, spending, True, None, False)
        limit = spending.budget * (step + 1) / steps
        left = limit - spending.spent
        is_due = start.measured and (step + 1) % self._every == 0
        is_due = is_due and spending.measured + spending.measurement <= self._measure_share * limit
        if is_due:
            batches = _whole((left - spending.measurement) / spending.batch)
            if batches >= 1:
                return self._step_size(batches, spending, True, self._samples, True)
        return self._step_size(_whole(left / spending.batch), spending, False, self._samples, True)

    @staticmethod
    def _step_size(batches: int, spending: Spending, measure: bool, samples: int | None, charge: bool) -> StepSize:
        batches = max(0, batches)
        before, after = (min(1.0, (spending.spent + n * spending.batch) / spending.budget) for n in (0, batches))
        return StepSize(batches, (before, after), measure, samples, charge)

    def samples(self, size: int) -> int:
        return min(self._samples, size)

    def progress(self, step: int, steps: int, spent: float, budget: float) -> float:
        return min(1.0, spent / budget)


def _whole(batches: float) -> int:
    return math.floor(batches * (1 + SLICE_ROUNDING))


def make_clock(
    *,
    batches: int | None,
    budget: float | None,
    budget_batches: float | None,
    budget_share: float,
    validation_samples: int,
    validation_every: int,
    measure_share: float,
) -> BatchClock | BudgetClock:
    """The clock of an environment: `batches` in each step, or a budget in FLOPs."""
    if batches is None:
        return BudgetClock(
            budget=budget,
            budget_batches=budget_batches,
            budget_share=budget_share,
            validation_samples=validation_samples,
            validation_every=validation_every,
            measure_share=measure_share,
        )
    for key, value in (("budget", budget), ("budget_batches", budget_batches)):
        if value is not None:
            raise ValueError(
                f"environment.{key}={value}: must be null with environment.batches={batches}; use environment=budget."
            )
    return BatchClock(batches)
