"""Environments without hosts: same slots, actions, features and rewards, but measurements follow from a formula."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from esper.environment.record import StepRecord, net_score
from esper.environment.step import GrowthStep, RewardResult
from esper.lifecycle import (
    ActionSpace,
    Rules,
    SeedMeasurements,
    Slots,
    Stage,
    acted_slots,
    apply,
    commit,
    legal,
    tick,
)
from esper.observation import (
    FEATURE_SETS,
    ClockView,
    Descriptors,
    HostMeasurements,
    Observation,
    View,
    first_view,
    make_layout,
    next_view,
    observe,
)
from esper.rng import derive_seed

HOST_PARAMETERS = 1_000.0  # parameters
CHANCE_SCORE = 10.0  # points of a host before training


class FormulaEnvironment(ABC):
    """N episodes without hosts. A subclass has the formula of the measurements.

    Arguments:
        space, rules: the action space and the lifecycle rules
        reward: computes the reward of a step
        envs: parallel episodes
        steps: decisions in an episode
        features: name of the feature set
    """

    name: ClassVar[str]
    rent: ClassVar[float]  # points that the score loses for each factor e of growth in parameters

    def __init__(
        self,
        *,
        space: ActionSpace,
        rules: Rules,
        reward: Callable[[StepRecord], RewardResult],
        envs: int,
        steps: int,
        features: str,
    ) -> None:
        self.space, self.rules, self.envs, self.steps = space, rules, envs, steps
        self._reward, self._features = reward, FEATURE_SETS[features]
        self.layout = make_layout(space, self._features)

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        return derive_seed(purpose, run_seed, index)

    def reset(self, episode_seeds: Sequence[int]) -> Observation:
        """Start one episode per episode seed."""
        self._slots = self._start(episode_seeds)
        self._host = torch.full((len(episode_seeds),), HOST_PARAMETERS)
        now = self._measure(self._slots, 0, False)
        self._initial = now.score
        clock = self._first_clock(now)
        self._view = first_view(self.steps, self._slots, now, self._host, self._describe(len(episode_seeds)), clock)
        return observe(self._view, legal(self._slots, self.space, self.rules), self._features)

    def step(self, action: Tensor) -> GrowthStep:
        """Run one step in each environment; `action` is int64 [envs, heads]."""
        before, earlier, step = self._slots, self._view.now, self._view.step
        last = step + 1 == self.steps
        decision = self.space.decode(action.cpu())
        acted = acted_slots(before, decision, self.space, self.rules)
        during, applied = apply(before, action.cpu(), self.space, self.rules)
        entered = applied.entered
        if last:
            during, committed = commit(during, self.rules)
            entered = entered | committed.entered
        self._train(during)
        now = self._measure(during, step + 1, last)
        after, ticked = tick(during, SeedMeasurements(now.contribution, now.seed_health), self.space, self.rules)
        no_rollback = torch.zeros_like(decision.op)
        record = StepRecord(
            step=step,
            steps=self.steps,
            decision=decision,
            acted=acted,
            before=before,
            during=during,
            after=after,
            entered=entered | ticked.entered,
            earlier=earlier,
            now=now,
            initial_score=self._initial,
            host_parameters=self._host,
            seed_parameters=self._seed_parameters(during),
            batches=no_rollback,
            rollback=no_rollback,
            terminated=torch.full_like(no_rollback, last, dtype=torch.bool),
            truncated=torch.zeros_like(no_rollback, dtype=torch.bool),
        )
        rewarded = self._reward(record)
        self._slots = after
        self._view = next_view(
            self._view,
            after,
            now,
            self._seed_parameters(after),
            decision.op,
            acted,
            no_rollback.bool(),
            self._next_clock(record),
        )
        observation = observe(self._view, legal(after, self.space, self.rules), self._features)
        return GrowthStep(observation, rewarded.total, rewarded, record.terminated, record.truncated, record)

    def outcome(self) -> dict[str, Tensor]:
        """The results of the episodes so far: tensors [envs]."""
        now, growth = self._view.now, self._view.now.parameters / HOST_PARAMETERS
        fossils = (self._slots.stage == Stage.FOSSILIZED).sum(1).float()
        return {
            "score": net_score(now.score, growth, self.rent),
            "validation_score": now.score,
            "growth": growth,
            "fossils": fossils,
        }

    def effort(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is open."""
        return None

    @property
    def view(self) -> View:
        return self._view

    @abstractmethod
    def _start(self, episode_seeds: Sequence[int]) -> Slots:
        """Draw what the episodes need, and return their empty slots."""

    @abstractmethod
    def _describe(self, envs: int) -> Descriptors:
        """The descriptors of the slots and blueprints of the episodes."""

    @abstractmethod
    def _seed_parameters(self, slots: Slots) -> Tensor:
        """Parameters of the current seeds: [envs, slots]; 0 without a seed."""

    @abstractmethod
    def _measure(self, slots: Slots, step: int, last: bool) -> HostMeasurements:
        """The measurements after `step` steps; after the `last`, only fossils count."""

    def _train(self, slots: Slots) -> None:
        """Train for one step; nothing if the formula depends on steps and ages only."""
        return None

    def _first_clock(self, now: HostMeasurements) -> ClockView | None:
        """What controllers see of the clock before the first step."""
        return None

    def _next_clock(self, record: StepRecord) -> ClockView | None:
        """What controllers see of the clock after a step."""
        return None

    def _measurements(
        self, slots: Slots, last: bool, *, score: Tensor, loss: Tensor, contribution: Tensor, loss_contribution: Tensor
    ) -> HostMeasurements:
        """The measurements of one step; contributions, [envs, slots], are those of live seeds that are blended in."""
        envs, slot_count = slots.stage.shape
        missing, missing_by_slot = torch.full((envs,), torch.nan), torch.full((envs, slot_count), torch.nan)
        blended = slots.live & (slots.alpha > 0)
        return HostMeasurements(
            train_loss=missing,
            train_accuracy=missing,
            loss=loss,
            accuracy=score / 100,
            score=score,
            gradient_norm=missing,
            health=torch.ones(envs),
            parameters=HOST_PARAMETERS + (self._seed_parameters(slots) * counted_seeds(slots, last)).sum(1),
            flops=torch.zeros(envs, dtype=torch.float64),
            contribution=torch.where(blended, contribution, torch.nan),
            loss_contribution=torch.where(blended, loss_contribution, torch.nan),
            progress=missing_by_slot,
            seed_gradient_norm=missing_by_slot,
            seed_health=torch.where(slots.live, 1.0, torch.nan),
            isolated_gain=missing_by_slot,
        )


def counted_seeds(slots: Slots, last: bool) -> Tensor:
    """The seeds that are part of the network when it is measured, bool [envs, slots]: after the last step, fossils."""
    return slots.stage == Stage.FOSSILIZED if last else slots.occupied
