"""Reward terms: pure functions of a step's record. Scores are in points, 0 to 100 for accuracy.

Every term sees all slots, is computed after the training that follows the action, and is multiplied by `weight`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.environment import StepRecord
from esper.lifecycle import Op, Slots, Stage
from esper.rewards.detectors import MIN_DENOMINATOR


@dataclass(frozen=True)
class Improvement:
    """The change of the validation score, in points."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * (record.now.score - record.earlier.score)


@dataclass(frozen=True)
class Rent:
    """The change of ln(parameters / host parameters): with a negative weight, growth costs in the step it happens."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * (record.now.parameters / record.earlier.parameters).log()


@dataclass(frozen=True)
class StandingRent:
    """min(scale x ln(parameters / host parameters), cap) in every step after a grace period."""

    weight: float
    scale: float
    cap: float
    grace: int  # steps

    def __call__(self, record: StepRecord) -> Tensor:
        growth = (record.now.parameters / record.host_parameters).log()
        is_due = record.step >= self.grace
        return self.weight * is_due * (self.scale * growth).clamp(max=self.cap)


POTENTIALS = {
    Stage.GERMINATED: 1.0,
    Stage.TRAINING: 2.0,
    Stage.BLENDING: 3.5,
    Stage.HOLDING: 5.5,
    Stage.FOSSILIZED: 6.0,
}
STEP_POTENTIAL, MAX_STEP_POTENTIAL = 0.3, 2.0  # for each step in a live stage, and at most


def potential(slots: Slots) -> Tensor:
    """The potential of the whole state, [envs]: the sum over slots of a value for their stage and the steps in it."""
    of_stage = torch.tensor([POTENTIALS.get(stage, 0.0) for stage in Stage])[slots.stage]
    of_steps = (STEP_POTENTIAL * slots.steps_in_stage).clamp(max=MAX_STEP_POTENTIAL)
    return (of_stage + torch.where(slots.live, of_steps, torch.zeros_like(of_steps))).sum(1)


@dataclass(frozen=True)
class StagePotential:
    """Potential-based shaping, gamma x potential(after) - potential(before): it does not change the optimal policy.

    It telescopes over an episode. The potential is 0 after a termination, and unchanged by a truncation.
    """

    weight: float
    gamma: float

    def __call__(self, record: StepRecord) -> Tensor:
        after = torch.where(record.terminated, torch.zeros_like(record.now.score), potential(record.after))
        return self.weight * (self.gamma * after - potential(record.before))


@dataclass(frozen=True)
class Rollback:
    """1 in the step that makes the governor roll the host back."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * (record.rollback > 0).float()


@dataclass(frozen=True)
class ActionCost:
    """A cost for each op, by name; 0 for an op that is not listed."""

    weight: float
    costs: Mapping[str, float]

    def __post_init__(self) -> None:
        for name in self.costs:
            if name not in Op.__members__:
                raise ValueError(f"reward.terms: costs.{name} is unknown; must be one of {', '.join(Op.__members__)}.")

    def __call__(self, record: StepRecord) -> Tensor:
        by_op = torch.tensor([self.costs.get(op.name, 0.0) for op in Op])
        return self.weight * by_op[record.decision.op]


def credit(contribution: Tensor, progress: Tensor) -> Tensor:
    """The credit for a seed's contribution, given the gain of the host since it germinated; 0 where not measured.

    A negative contribution counts in full. A positive one counts in full up to the gain, above it as the harmonic mean
    of both, and as 0 if there is no gain.
    """
    mean = 2 * progress * contribution / (contribution + progress).clamp(min=MIN_DENOMINATOR)
    positive = torch.where(progress <= 0, 0.0, torch.where(contribution >= progress, mean, contribution))
    return torch.nan_to_num(torch.where(contribution < 0, contribution, positive), nan=0.0)


@dataclass(frozen=True)
class Attribution:
    """The change of the credit of all seeds, so that a seed is credited once and not in every step.

    In the last step only fossils count, because live seeds are switched off.
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
    """A penalty for each seed that seems to contribute far more than the host has gained since it germinated."""

    weight: float
    threshold: float  # contribution / gain up to which there is no penalty
    min_gain: float  # points; below, the penalty depends on the contribution only
    cap: float  # largest penalty of a seed

    def __call__(self, record: StepRecord) -> Tensor:
        contribution, gain = record.now.contribution, record.now.progress
        floor = max(self.min_gain, MIN_DENOMINATOR)
        ratio = contribution / gain.clamp(min=floor)
        by_ratio = (self.cap / 3 * (ratio - self.threshold) / self.threshold).clamp(0, self.cap)
        by_contribution = self.cap * (contribution / 10).clamp(0, 1)
        penalty = torch.where(gain > floor, by_ratio, by_contribution)
        return self.weight * torch.nan_to_num(torch.where(contribution > 1, penalty, 0.0), nan=0.0).sum(1)


@dataclass(frozen=True)
class BlendingWarning:
    """A penalty for each seed that blends in although the score has fallen since it germinated."""

    weight: float
    base: float
    per_step: float  # for each step in BLENDING
    cap: float  # largest penalty of a seed

    def __call__(self, record: StepRecord) -> Tensor:
        is_harmful = (record.after.stage == Stage.BLENDING) & ~record.after.blending_out & (record.now.progress < 0)
        penalty = (self.base + self.per_step * record.after.steps_in_stage).clamp(max=self.cap)
        return self.weight * (penalty * is_harmful).sum(1)


@dataclass(frozen=True)
class Indecision:
    """A penalty for each contributing seed that stays in HOLDING without a decision."""

    weight: float
    grace: int  # steps in HOLDING without a penalty
    base: float
    per_step: float  # for each step beyond `grace`
    cap: float  # largest penalty of a seed

    def __call__(self, record: StepRecord) -> Tensor:
        over = record.after.steps_in_stage - self.grace
        held = (record.after.stage == Stage.HOLDING) & (over >= 0) & (record.after.contribution > 0)
        return self.weight * ((self.base + self.per_step * over).clamp(max=self.cap) * held).sum(1)


@dataclass(frozen=True)
class FossilizeShaping:
    """For each seed that is fossilised: the bonus base + per_point x its credit, or a penalty.

    The penalty applies if the contribution is too small, or if the score has fallen since the seed germinated.
    """

    weight: float
    min_contribution: float  # points; below, the penalty applies
    base: float
    per_point: float
    cap: float  # largest bonus
    penalty: float
    full_credit_steps: int  # a seed with fewer steps in HOLDING gets a proportional part of the bonus

    def __call__(self, record: StepRecord) -> Tensor:
        contribution = torch.nan_to_num(record.before.contribution, nan=0.0)
        share = (record.before.steps_in_stage / self.full_credit_steps).clamp(max=1)
        earned = credit(contribution, record.earlier.progress)
        bonus = (self.base + self.per_point * earned).clamp(max=self.cap) * share
        is_poor = (contribution < self.min_contribution) | (record.earlier.progress < 0)
        value = torch.where(is_poor, torch.full_like(bonus, -self.penalty), bonus)
        return self.weight * (value * record.entered[..., Stage.FOSSILIZED]).sum(1)


@dataclass(frozen=True)
class PruneShaping:
    """For a seed that is pruned: a bonus if its contribution is negative, else a penalty; 0 if it was not measured."""

    weight: float
    harmful_bonus: float
    useful_penalty: float
    per_point: float  # added to the penalty for each point of contribution
    cap: float  # largest penalty

    def __call__(self, record: StepRecord) -> Tensor:
        pruned = record.acted & (record.decision.op == Op.PRUNE).unsqueeze(1)
        contribution = torch.nan_to_num(record.before.contribution, nan=0.0)
        penalty = (self.useful_penalty + self.per_point * contribution).clamp(max=self.cap)
        value = torch.where(contribution < 0, torch.full_like(penalty, self.harmful_bonus), -penalty)
        value = torch.where(record.before.contribution.isnan(), torch.zeros_like(value), value)
        return self.weight * (value * pruned).sum(1)


@dataclass(frozen=True)
class EarlyPrune:
    """1 if a seed younger than `min_age` is pruned."""

    weight: float
    min_age: int  # steps since germination

    def __call__(self, record: StepRecord) -> Tensor:
        young = record.acted & (record.before.age < self.min_age)
        return self.weight * (young.any(1) & (record.decision.op == Op.PRUNE)).float()


def _at_end(record: StepRecord, value: Tensor) -> Tensor:
    return torch.where(record.terminated | record.truncated, value, torch.zeros_like(value))


@dataclass(frozen=True)
class FinalScore:
    """The score of the host with its committed seeds, in the last step."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * _at_end(record, record.now.score)


@dataclass(frozen=True)
class FinalRent:
    """-ln(parameters / host parameters) with the committed seeds, in the last step."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * _at_end(record, -(record.now.parameters / record.host_parameters).log())


@dataclass(frozen=True)
class FinalGain:
    """The score minus the score of the untrained host, in the last step."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * _at_end(record, record.now.score - record.initial_score)


@dataclass(frozen=True)
class FinalFossils:
    """The number of fossils with enough contribution when last measured, in the last step."""

    weight: float
    min_contribution: float  # points

    def __call__(self, record: StepRecord) -> Tensor:
        is_counted = (record.after.stage == Stage.FOSSILIZED) & (record.after.contribution >= self.min_contribution)
        return self.weight * _at_end(record, is_counted.sum(1).float())


@dataclass(frozen=True)
class Sparse:
    """(score - base) / span - per_parameter x parameters, clipped to [-1, 1] before weighting, in the last step."""

    weight: float
    base: float  # score that is worth 0
    span: float  # points above `base` that are worth 1
    per_parameter: float  # cost of each parameter

    def __call__(self, record: StepRecord) -> Tensor:
        value = (record.now.score - self.base) / self.span - self.per_parameter * record.now.parameters
        return self.weight * _at_end(record, value.clamp(-1, 1))


@dataclass(frozen=True)
class ParameterRent:
    """The cost of all seed parameters in every step, each seed weighted by its alpha."""

    weight: float
    per_parameter: float  # cost of each parameter

    def __call__(self, record: StepRecord) -> Tensor:
        effective = (record.during.alpha * record.seed_parameters).sum(1)
        return self.weight * self.per_parameter * effective


@dataclass(frozen=True)
class LossImprovement:
    """The decrease of the validation loss in units of `sigma`; an increase counts half."""

    weight: float
    sigma: float  # noise of the loss between steps
    cap: float  # largest change that counts, in units of sigma

    def __call__(self, record: StepRecord) -> Tensor:
        decrease = ((record.earlier.loss - record.now.loss) / self.sigma).clamp(-self.cap, self.cap)
        return self.weight * torch.where(decrease < 0, decrease / 2, decrease)


@dataclass(frozen=True)
class FinalLoss:
    """Progress of the loss from `base` to `target`, 0 to 1, in the last step."""

    weight: float
    base: float  # loss that is worth 0, such as the loss at chance level
    target: float  # loss that is worth 1

    def __post_init__(self) -> None:
        if not self.base > self.target or math.isinf(self.base):
            raise ValueError(f"reward.terms: base={self.base}: must be finite and above target={self.target}.")

    def __call__(self, record: StepRecord) -> Tensor:
        share = (self.base - record.now.loss) / (self.base - self.target)
        return self.weight * _at_end(record, share.clamp(0, 1))
