"""Collects what is known after a piece of training."""

import math
from collections.abc import Mapping
from typing import Any, Required, TypedDict

from torch import Tensor, nn

from esper.grow.gradients import GradientWatch
from esper.grow.guard import GoodState
from esper.grow.learning_rate import LearningRateMass
from esper.grow.observe import NAN, StepMeasurements
from esper.grow.optimizers import SeedGroups
from esper.grow.plan import GrowthPlan
from esper.grow.probes import Contributions, Evaluate, measure_contributions
from esper.grow.spending import FlopsSpent
from esper.grow.structure import NetworkStructure

Scalar = float | Tensor


class StepResults(TypedDict, total=False):
    """What the user knows after a piece of training; see `Grower.step`."""

    val_loss: Required[Scalar]
    train_loss: Scalar | None
    score: Scalar | None
    train_score: Scalar | None
    evaluate: Evaluate | None
    progress: float | None


class Measurer:
    """Turns what the user knows into measurements.

    Arguments:
        model, plan, structure, groups: of the growth
        spent: FLOPs of the training
        budget: in FLOPs; None measures progress in steps
        factor: points of a score of 1, negative where a lower score is better
    """

    def __init__(
        self,
        model: nn.Module,
        plan: GrowthPlan,
        structure: NetworkStructure,
        groups: SeedGroups,
        spent: FlopsSpent,
        *,
        budget: float | None,
        factor: float,
    ) -> None:
        self._model, self._plan, self._structure, self._spent = model, plan, structure, spent
        self._budget, self._factor = budget, factor
        self._lr_mass, self._gradients = LearningRateMass(groups), GradientWatch(groups)

    def collect(
        self,
        *,
        val_loss: Scalar,
        train_loss: Scalar | None = None,
        score: Scalar | None = None,
        train_score: Scalar | None = None,
        evaluate: Evaluate | None = None,
        progress: float | None = None,
        good: GoodState | None,
        guard: bool,
    ) -> StepMeasurements:
        """The measurements; with `guard`, those of the last good state if the newest seed broke the network."""
        loss, trained = _number(val_loss), _number(train_loss)
        broken = self._broken_slot(loss, 0.0 if train_loss is None else trained) if guard else None
        points, trained_points = self._points(score, loss), self._points(train_score, trained)
        if broken is not None:
            loss, points = (NAN, NAN) if good is None else (good.loss, good.score)
            trained = trained_points = NAN
        norms, health = self._gradients.read()
        found = Contributions() if broken is not None or evaluate is None else self._contributions(evaluate)
        share = self.progress(progress)
        return StepMeasurements(
            progress=share,
            loss=loss,
            score=points,
            train_loss=trained,
            accuracy=points / 100 if train_score is not None else _likelihood(loss),
            train_accuracy=trained_points / 100 if train_score is not None else _likelihood(trained),
            lr_left=self._lr_mass.left(share),
            flops=self._spent.total,
            gradient_norm=norms.pop(None, NAN),
            health=health.pop(None, NAN),
            contribution=found.score,
            loss_contribution=found.loss,
            seed_gradient_norm={str(slot): value for slot, value in norms.items()},
            seed_health={str(slot): value for slot, value in health.items()},
            rolled_back=broken,
            has_contributions=evaluate is not None,
        )

    def progress(self, given: float | None) -> float:
        """The share of the training that is over, given by the user, or that of the budget or of the steps."""
        if given is not None:
            return min(1.0, given)
        return self.spent_share if self._budget is not None else min(1.0, (self._plan.step + 1) / self._plan.steps)

    @property
    def spent_share(self) -> float:
        """The share of the budget that is spent, at most 1; without a budget, the share of steps."""
        share = self._plan.step / self._plan.steps if self._budget is None else self._spent.total / self._budget
        return min(1.0, share)

    def state_dict(self) -> dict[str, Any]:
        return self._lr_mass.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._lr_mass.load_state_dict(state)

    def _points(self, score: Scalar | None, loss: float) -> float:
        """A score in points, higher is better; the negative loss takes the place of an unknown one."""
        return -loss * abs(self._factor) if score is None else self._factor * _number(score)

    def _broken_slot(self, loss: float, trained: float) -> str | None:
        """The slot of the newest seed if a loss is non-finite."""
        live = self._plan.live
        is_good = math.isfinite(loss) and math.isfinite(trained)
        return None if is_good or not live else min(live, key=self._plan.age)

    @property
    def measured_slots(self) -> tuple[str, ...]:
        """Slots of the live seeds that are in the output."""
        return tuple(slot for slot in self._structure.probed if slot in self._plan.live)

    def _contributions(self, evaluate: Evaluate) -> Contributions:
        slots = self.measured_slots
        if not slots or not self._spent.pay_for_measurement(len(slots)):
            return Contributions()
        return measure_contributions(self._model, slots, evaluate, self._points)


def _number(value: Scalar | None) -> float:
    """A plain number; NaN if it is not known."""
    if value is None:
        return NAN
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _likelihood(loss: float) -> float:
    """The mean likelihood of the right answer, which takes the place of an accuracy; NaN of an unknown loss."""
    return NAN if math.isnan(loss) else math.exp(-max(0.0, loss))
