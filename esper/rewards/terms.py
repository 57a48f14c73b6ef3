"""Reward terms: pure functions of a step's record. Scores are in points, 0 to 100 for accuracy.

Every term sees all slots, pays for the epoch that its action preceded, and is bounded.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.environment import StepRecord
from esper.lifecycle import Op, Slots, Stage

SMALLEST = 1e-8  # a ratio is formed only above this, so that nothing is divided by zero


@dataclass(frozen=True)
class Improvement:
    """The change of the validation score, in points."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * (record.now.score - record.earlier.score)


@dataclass(frozen=True)
class Rent:
    """The change of ln(parameters / host parameters); with a negative weight, growth costs when it happens."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * (record.now.parameters / record.earlier.parameters).log()


@dataclass(frozen=True)
class StandingRent:
    """min(scale x ln(growth), cap) every step, after some steps of grace."""

    weight: float
    scale: float
    cap: float
    grace: int

    def __call__(self, record: StepRecord) -> Tensor:
        growth = (record.now.parameters / record.host_parameters).log()
        due = record.step >= self.grace
        return self.weight * due * (self.scale * growth).clamp(max=self.cap)


POTENTIALS = {
    Stage.GERMINATED: 1.0,
    Stage.TRAINING: 2.0,
    Stage.BLENDING: 3.5,
    Stage.HOLDING: 5.5,
    Stage.FOSSILIZED: 6.0,
}
EPOCH_POTENTIAL, MOST_EPOCH_POTENTIAL = 0.3, 2.0  # for each epoch in a live stage, and at most


def potential(slots: Slots) -> Tensor:
    """A function of the whole state, [envs]: the sum over slots of what their stage promises."""
    of_stage = torch.tensor([POTENTIALS.get(stage, 0.0) for stage in Stage])[slots.stage]
    waited = (EPOCH_POTENTIAL * slots.steps_in_stage).clamp(max=MOST_EPOCH_POTENTIAL)
    return (of_stage + torch.where(slots.live, waited, torch.zeros_like(waited))).sum(1)


@dataclass(frozen=True)
class StagePotential:
    """gamma x potential(after) - potential(before): it speeds learning up and cannot change what is best.

    Over an episode it telescopes; the potential is 0 at a termination and stays at a truncation.
    """

    weight: float
    gamma: float

    def __call__(self, record: StepRecord) -> Tensor:
        after = torch.where(record.terminated, torch.zeros_like(record.now.score), potential(record.after))
        return self.weight * (self.gamma * after - potential(record.before))


@dataclass(frozen=True)
class Rollback:
    """Paid by the very step that made the governor roll the host back."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * (record.rollback > 0).float()


@dataclass(frozen=True)
class ActionCost:
    """A price for each op, by name."""

    weight: float
    costs: Mapping[str, float]

    def __post_init__(self) -> None:
        for name in self.costs:
            if name not in Op.__members__:
                raise ValueError(f"reward.terms: the op {name} is unknown; allowed are {', '.join(Op.__members__)}.")

    def __call__(self, record: StepRecord) -> Tensor:
        prices = torch.tensor([self.costs.get(op.name, 0.0) for op in Op])
        return self.weight * prices[record.decision.op]


def credit(contribution: Tensor, progress: Tensor) -> Tensor:
    """What a seed's contribution is worth, given the score gained since it germinated; 0 where it was not measured.

    A contribution beyond the gain counts as their harmonic mean, and none counts without a gain. A negative one counts
    in full.
    """
    both = (contribution + progress).clamp(min=SMALLEST)
    mean = 2 * progress * contribution / both
    positive = torch.where(progress <= 0, 0.0, torch.where(contribution >= progress, mean, contribution))
    return torch.nan_to_num(torch.where(contribution < 0, contribution, positive), nan=0.0)


@dataclass(frozen=True)
class Attribution:
    """The change of all seeds' credit, so that holding on to a seed pays nothing more than having it once.

    At the end only fossils count, for the others are switched off.
    """

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        now = credit(record.after.contribution, record.now.progress)
        ended = (record.terminated | record.truncated).unsqueeze(1)
        now = torch.where(ended & (record.after.stage != Stage.FOSSILIZED), torch.zeros_like(now), now)
        earlier = credit(record.before.contribution, record.earlier.progress)
        return self.weight * (now.sum(1) - earlier.sum(1))


@dataclass(frozen=True)
class RatioPenalty:
    """For seeds that seem to contribute far more than the host has gained: at most `most` a seed."""

    weight: float
    threshold: float  # ratio of contribution to gain that is still believed
    min_gain: float  # points; below, only the contribution counts
    cap: float

    def __call__(self, record: StepRecord) -> Tensor:
        contribution, gained = record.now.contribution, record.now.progress
        floor = max(self.min_gain, SMALLEST)
        ratio = contribution / gained.clamp(min=floor)
        excess = (self.cap / 3 * (ratio - self.threshold) / self.threshold).clamp(0, self.cap)
        little = self.cap * (contribution / 10).clamp(0, 1)
        penalty = torch.where(gained > floor, excess, little)
        return self.weight * torch.nan_to_num(torch.where(contribution > 1, penalty, 0.0), nan=0.0).sum(1)


@dataclass(frozen=True)
class BlendingWarning:
    """For each blending seed since whose germination the host has lost: first + more for each epoch, at most `most`."""

    weight: float
    base: float
    per_step: float
    cap: float

    def __call__(self, record: StepRecord) -> Tensor:
        bad = (record.after.stage == Stage.BLENDING) & ~record.after.blending_out & (record.now.progress < 0)
        size = (self.base + self.per_step * record.after.steps_in_stage).clamp(max=self.cap)
        return self.weight * (size * bad).sum(1)


@dataclass(frozen=True)
class Indecision:
    """For each contributing seed that is held without a verdict: grows by the epoch, at most `most`."""

    weight: float
    grace: int  # epochs
    base: float
    per_step: float
    cap: float

    def __call__(self, record: StepRecord) -> Tensor:
        over = record.after.steps_in_stage - self.grace
        held = (record.after.stage == Stage.HOLDING) & (over >= 0) & (record.after.contribution > 0)
        return self.weight * ((self.base + self.per_step * over).clamp(max=self.cap) * held).sum(1)


@dataclass(frozen=True)
class FossilizeShaping:
    """For each seed fossilised: base + per_point x its credit if its contribution is enough, else a fixed loss.

    A seed held for less than `legitimate` epochs earns only a part.
    """

    weight: float
    min_contribution: float  # points
    base: float
    per_point: float
    cap: float
    penalty: float
    full_credit_steps: int

    def __call__(self, record: StepRecord) -> Tensor:
        contribution = torch.nan_to_num(record.before.contribution, nan=0.0)
        share = (record.before.steps_in_stage / self.full_credit_steps).clamp(max=1)
        earned = credit(contribution, record.earlier.progress)
        good = (self.base + self.per_point * earned).clamp(max=self.cap) * share
        bad = (contribution < self.min_contribution) | (record.earlier.progress < 0)
        value = torch.where(bad, torch.full_like(good, -self.penalty), good)
        return self.weight * (value * record.entered[..., Stage.FOSSILIZED]).sum(1)


@dataclass(frozen=True)
class PruneShaping:
    """For each seed pruned: a little for a harmful one, a bounded loss for a useful one."""

    weight: float
    harmful_bonus: float
    useful_penalty: float
    per_point: float
    cap: float

    def __call__(self, record: StepRecord) -> Tensor:
        chosen = torch.arange(record.before.stage.shape[1]) == record.decision.slot.unsqueeze(1)
        pruned = chosen & (record.decision.op == Op.PRUNE).unsqueeze(1)
        contribution = torch.nan_to_num(record.before.contribution, nan=0.0)
        loss = (self.useful_penalty + self.per_point * contribution).clamp(max=self.cap)
        value = torch.where(contribution < 0, torch.full_like(loss, self.harmful_bonus), -loss)
        value = torch.where(record.before.contribution.isnan(), torch.zeros_like(value), value)
        return self.weight * (value * pruned).sum(1)


@dataclass(frozen=True)
class EarlyPrune:
    """A price for pruning a seed younger than `min_age` steps."""

    weight: float
    min_age: int

    def __call__(self, record: StepRecord) -> Tensor:
        chosen = torch.arange(record.before.stage.shape[1]) == record.decision.slot.unsqueeze(1)
        young = chosen & (record.before.age < self.min_age)
        return self.weight * (young.any(1) & (record.decision.op == Op.PRUNE)).float()


def _at_the_end(record: StepRecord, value: Tensor) -> Tensor:
    return torch.where(record.terminated | record.truncated, value, torch.zeros_like(value))


@dataclass(frozen=True)
class FinalScore:
    """The score of what was committed, at the end."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * _at_the_end(record, record.now.score)


@dataclass(frozen=True)
class FinalGain:
    """The score gained since the episode began, at the end."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * _at_the_end(record, record.now.score - record.initial_score)


@dataclass(frozen=True)
class FinalFossils:
    """How many fossils contributed at least `enough` points when last measured, at the end."""

    weight: float
    min_contribution: float

    def __call__(self, record: StepRecord) -> Tensor:
        good = (record.after.stage == Stage.FOSSILIZED) & (record.after.contribution >= self.min_contribution)
        return self.weight * _at_the_end(record, good.sum(1).float())


@dataclass(frozen=True)
class Sparse:
    """(score - base) / span less a price for parameters, held within [-1, 1] and only then weighted, at the end."""

    weight: float
    base: float
    span: float
    per_parameter: float

    def __call__(self, record: StepRecord) -> Tensor:
        value = (record.now.score - self.base) / self.span - self.per_parameter * record.now.parameters
        return self.weight * _at_the_end(record, value.clamp(-1, 1))


@dataclass(frozen=True)
class ParameterRent:
    """A price each step for every parameter a seed adds, by how much of it is blended in."""

    weight: float
    per_parameter: float

    def __call__(self, record: StepRecord) -> Tensor:
        effective = (record.during.alpha * record.seed_parameters).sum(1)
        return self.weight * self.per_parameter * effective


@dataclass(frozen=True)
class LossImprovement:
    """The fall of the validation loss in units of `sigma`, at most `most` of them; a rise counts half."""

    weight: float
    sigma: float
    cap: float

    def __call__(self, record: StepRecord) -> Tensor:
        fall = ((record.earlier.loss - record.now.loss) / self.sigma).clamp(-self.cap, self.cap)
        return self.weight * torch.where(fall < 0, fall / 2, fall)


@dataclass(frozen=True)
class FinalLoss:
    """How far the loss came from `base` to `target`, between 0 and 1, at the end; any task, by its two losses."""

    weight: float
    base: float
    target: float

    def __post_init__(self) -> None:
        if not self.base > self.target or math.isinf(self.base):
            raise ValueError(f"reward.terms: base={self.base} must be above target={self.target}.")

    def __call__(self, record: StepRecord) -> Tensor:
        share = (self.base - record.now.loss) / (self.base - self.target)
        return self.weight * _at_the_end(record, share.clamp(0, 1))
