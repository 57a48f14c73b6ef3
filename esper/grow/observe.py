"""What a controller observes of the user's training: the same views as in an environment, for one network.

What cannot be known is NaN, and the optional group of such features is marked as missing.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from esper.grow.costs import NetworkCosts
from esper.lifecycle import ActionSpace, SeedMeasurements, Slots
from esper.observation import ClockView, HostMeasurements, View, first_view, next_view

NAN = float("nan")


@dataclass(frozen=True)
class StepMeasurements:
    """What is known after a piece of training; plain numbers. NaN was not measured."""

    progress: float  # share of the training that is over
    loss: float  # validation
    score: float  # points; higher is better
    train_loss: float = NAN
    accuracy: float = NAN  # validation, 0 to 1
    train_accuracy: float = NAN
    lr_left: float = NAN  # share of the learning rate's sum that is left; NaN is that of the training
    flops: float = 0.0  # spent so far
    gradient_norm: float = NAN  # of the network without seeds
    health: float = NAN
    contribution: Mapping[str, float] = field(default_factory=dict)  # by slot: score with the seed minus without it
    loss_contribution: Mapping[str, float] = field(default_factory=dict)  # loss without the seed minus with it
    seed_gradient_norm: Mapping[str, float] = field(default_factory=dict)
    seed_health: Mapping[str, float] = field(default_factory=dict)
    has_contributions: bool = False  # whether this training measures them at all
    rolled_back: str | None = None  # slot of the seed that was removed because of a non-finite loss

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "StepMeasurements":
        return cls(**saved)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, to be saved or sent to other processes."""
        return asdict(self)

    def seeds(self, space: ActionSpace) -> SeedMeasurements:
        """What the lifecycle needs."""
        return SeedMeasurements(contribution=_row(self.contribution, space), health=_row(self.seed_health, space))


class Observer:
    """Turns measurements into views.

    Arguments:
        costs: of the network
        space: slots and blueprints
        slots: at the start
        steps: number of decisions
        passes: the training in passes over the training set
        chance_loss: loss at chance level; None is the first validation loss
    """

    def __init__(
        self,
        costs: NetworkCosts,
        space: ActionSpace,
        slots: Slots,
        *,
        steps: int,
        passes: float,
        chance_loss: float | None,
    ) -> None:
        self._costs, self._space, self._passes, self._chance_loss = costs, space, passes, chance_loss
        self._empty = torch.full_like(slots.alpha, torch.nan)
        self._start_score, self._loss_contribution, self._start = self._empty, self._empty, self._empty
        self._first_loss = NAN
        nothing = StepMeasurements(progress=0.0, loss=NAN, score=NAN)
        parameters = torch.tensor([float(max(1, costs.parameters))])
        self._view = first_view(
            steps,
            slots,
            self._measurements(nothing, slots),
            parameters,
            costs.describe(space),
            self._clock(nothing, slots),
        )

    @property
    def view(self) -> View:
        """What is known now."""
        return self._view

    def note_germination(self, where: Tensor) -> None:
        """Record when the seeds in some slots, bool [1, slots], were planted."""
        now = self._view.now.score.unsqueeze(1)
        self._start_score = torch.where(where, now, self._start_score)

    def advance(self, measured: StepMeasurements, slots: Slots, germinated: Tensor, op: Tensor, acted: Tensor) -> View:
        """The view after a piece of training.

        Arguments:
            measured: after it
            slots: after its lifecycle tick
            germinated: bool [1, slots], seeds that were planted before it
            op, acted: the last decision: Op value [1] and its slots, bool [1, slots]
        """
        gone = ~slots.occupied
        self._start_score = torch.where(gone, torch.nan, self._start_score)
        self._loss_contribution = torch.where(gone, torch.nan, self._loss_contribution)
        self._first_loss = measured.loss if self._first_loss != self._first_loss else self._first_loss
        clock = self._clock(measured, slots)
        clock = replace(clock, start=self._next_start(germinated, slots))
        before, now = self._view, self._measurements(measured, slots)
        if before.best.isnan().any():  # nothing was measured before the first decision
            before = replace(before, best=now.score)
        rollback = torch.tensor([measured.rolled_back is not None])
        parameters = self._costs.parameters_by_slot(slots, self._space)
        self._view = next_view(before, slots, now, parameters, op, acted, rollback, clock)
        return self._view

    def _next_start(self, germinated: Tensor, slots: Slots) -> Tensor:
        assert self._view.clock is not None
        self._start = replace(self._view.clock, start=self._start).next_start(germinated, slots.occupied)
        return self._start

    def _clock(self, measured: StepMeasurements, slots: Slots) -> ClockView:
        cost = self._costs.relative_by_slot(slots, self._space)
        spent = min(1.0, measured.progress)
        first = measured.loss if self._first_loss != self._first_loss else self._first_loss
        left = 1 - spent if measured.lr_left != measured.lr_left else measured.lr_left
        return ClockView(
            spent=torch.tensor([spent]),
            lr_left=torch.tensor([left]),
            passes=torch.tensor([self._passes]),
            cost=1 + cost.sum(1) if self._costs.are_known else torch.tensor([NAN]),
            seed_cost=cost,
            start=self._start,
            first_loss=torch.tensor([first]),
            chance_loss=torch.tensor([first if self._chance_loss is None else self._chance_loss]),
            fresh=torch.tensor([measured.loss == measured.loss]),
        )

    def _measurements(self, measured: StepMeasurements, slots: Slots) -> HostMeasurements:
        def one(value: float) -> Tensor:
            return torch.tensor([value])

        latest = _row(measured.loss_contribution, self._space)
        self._loss_contribution = torch.where(latest.isnan(), self._loss_contribution, latest)
        seeds = self._costs.parameters_by_slot(slots, self._space).sum(1)
        return HostMeasurements(
            train_loss=one(measured.train_loss),
            train_accuracy=one(measured.train_accuracy),
            loss=one(measured.loss),
            accuracy=one(measured.accuracy),
            score=one(measured.score),
            gradient_norm=one(measured.gradient_norm),
            health=one(measured.health),
            parameters=float(max(1, self._costs.parameters)) + seeds,
            flops=torch.tensor([measured.flops], dtype=torch.float64),
            contribution=_row(measured.contribution, self._space),
            loss_contribution=self._loss_contribution,
            progress=one(measured.score).unsqueeze(1) - self._start_score,
            seed_gradient_norm=_row(measured.seed_gradient_norm, self._space),
            seed_health=_row(measured.seed_health, self._space),
            isolated_gain=self._empty,
        )


def missing_groups(measured: StepMeasurements, costs: NetworkCosts) -> tuple[str, ...]:
    """The optional groups of features that a training does not provide."""
    is_missing = {
        "contribution": not measured.has_contributions,
        "gradients": False,
        "flops": not costs.are_known,
        "train_loss": measured.train_loss != measured.train_loss,
    }
    return tuple(group for group, missing in is_missing.items() if missing)


def _row(values: Mapping[str, float], space: ActionSpace) -> Tensor:
    """[1, slots]; NaN where a slot has no value."""
    return torch.tensor([[values.get(slot, NAN) for slot in space.slots]])
