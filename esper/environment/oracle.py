"""An environment without a host: same slots, actions, features and rewards, but the score is a known formula.

The best possible score is known, so a failure to learn is a fault of the learner and not of the task. A thousand
episodes take seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import permutations, product

import torch
from torch import Tensor

from esper.arguments import Count
from esper.environment.record import StepRecord, net_score
from esper.environment.step import GrowthStep, RewardResult
from esper.lifecycle import ActionSpace, Op, Rules, SeedMeasurements, Slots, Stage, apply, commit, legal, tick
from esper.observation import (
    FEATURE_SETS,
    Descriptors,
    HostMeasurements,
    Observation,
    View,
    describe_candidate,
    first_view,
    make_layout,
    next_view,
    observe,
)
from esper.rng import derive_seed, make_generator

HOST_PARAMETERS = 1_000.0  # parameters
CHANCE_SCORE, HOST_SCORE = 10.0, 30.0  # points before training, and that a host without seeds reaches
PACE = 5.0  # time constant in steps: after it, hosts and seeds have 63% of their final score


class Oracle:
    """N episodes whose score is the score of the host plus the share of each blended seed.

    The share of a seed is alpha x gain x (1 - e^(-age / PACE)), so earlier seeds are worth more. After the last step
    only fossils count. Measured scores have noise that is derived from the episode seed.

    Arguments:
        space, rules: the action space and the lifecycle rules
        reward: computes the reward of a step
        envs: parallel episodes
        steps: decisions in an episode
        gains: points that a fully trained seed adds, by blueprint, one for each slot
        sizes: parameters of a seed relative to the host, by blueprint
        noise: standard deviation of each measured score, in points
    """

    name = "oracle"

    def __init__(
        self,
        *,
        space: ActionSpace,
        rules: Rules,
        reward: Callable[[StepRecord], RewardResult],
        envs: Count,
        steps: Count,
        gains: Mapping[str, Sequence[float]],
        sizes: Mapping[str, float],
        noise: float,
    ) -> None:
        for key, table in (("gains", gains), ("sizes", sizes)):
            if missing := [name for name in space.blueprints if name not in table]:
                raise ValueError(f"environment.{key}: must have an entry for {', '.join(missing)}.")
        for name in space.blueprints:
            if len(gains[name]) != len(space.slots):
                raise ValueError(
                    f"environment.gains.{name}={list(gains[name])}: must have an entry for each of "
                    f"{', '.join(space.slots)}."
                )
        self.space, self.rules, self.envs, self.steps = space, rules, envs, steps
        self._features = FEATURE_SETS["absolute"]
        self.layout = make_layout(space, self._features)
        self._reward, self._noise = reward, noise
        self._gains = torch.tensor([list(gains[name]) for name in space.blueprints])  # [blueprints, slots]
        self._sizes = torch.tensor([float(sizes[name]) for name in space.blueprints]) * HOST_PARAMETERS

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        return derive_seed(purpose, run_seed, index)

    def reset(self, episode_seeds: Sequence[int]) -> Observation:
        """Start one episode per episode seed."""
        draws = [
            torch.randn(self.steps + 1, generator=make_generator("oracle", episode_seed))
            for episode_seed in episode_seeds
        ]
        self._score_noise = self._noise * torch.stack(draws)  # [envs, steps + 1]
        self._slots = Slots.empty(len(episode_seeds), len(self.space.slots))
        self._host = torch.full((len(episode_seeds),), HOST_PARAMETERS)
        now = self._measure(self._slots, 0, False)
        self._initial = now.score
        self._view = first_view(self.steps, self._slots, now, self._host, self._describe(len(episode_seeds)))
        return observe(self._view, legal(self._slots, self.space, self.rules), self._features)

    def step(self, action: Tensor) -> GrowthStep:
        """Run one step in each environment; `action` is int64 [envs, heads]."""
        before, earlier, step = self._slots, self._view.now, self._view.step
        last = step + 1 == self.steps
        decision = self.space.decode(action.cpu())
        during, applied = apply(before, action.cpu(), self.space, self.rules)
        entered = applied.entered
        if last:
            during, committed = commit(during, self.rules)
            entered = entered | committed.entered
        now = self._measure(during, step + 1, last)
        after, ticked = tick(during, SeedMeasurements(now.contribution, now.seed_health), self.space, self.rules)
        no_rollback = torch.zeros_like(decision.op)
        record = StepRecord(
            step=step,
            steps=self.steps,
            decision=decision,
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
            self._view, after, now, self._seed_parameters(after), decision.op, decision.slot, no_rollback.bool()
        )
        observation = observe(self._view, legal(after, self.space, self.rules), self._features)
        return GrowthStep(observation, rewarded.total, rewarded, record.terminated, record.truncated, record)

    def outcome(self) -> dict[str, Tensor]:
        """The results of the episodes so far: tensors [envs]."""
        now, growth = self._view.now, self._view.now.parameters / HOST_PARAMETERS
        fossils = (self._slots.stage == Stage.FOSSILIZED).sum(1).float()
        return {
            "score": net_score(now.score, growth),
            "validation_score": now.score,
            "growth": growth,
            "fossils": fossils,
        }

    def effort(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass

    @property
    def view(self) -> View:
        return self._view

    def optimum(self) -> float:
        """The highest score that any controller can reach, without noise.

        Earlier seeds are worth more, so the best plan germinates one seed in each of the first steps and fossilises it
        as soon as possible. This method tries all choices of seeds in all orders.
        """
        slots, options = range(len(self.space.slots)), (-1, *range(len(self.space.blueprints)))
        plans = torch.tensor(
            [
                list(zip(order, chosen, strict=True))
                for order in permutations(slots)
                for chosen in product(options, repeat=len(slots))
            ]
        )  # [plans, germinations, slot and blueprint], blueprint -1 for none
        noiseless = copy(self)
        noiseless._noise = 0.0
        noiseless.reset([0] * len(plans))
        for step in range(self.steps):
            germination = plans[:, step] if step < len(slots) else torch.full_like(plans[:, 0], -1)
            noiseless.step(noiseless._plan_action(germination))
        return float(noiseless.outcome()["score"].max())

    def _plan_action(self, germination: Tensor) -> Tensor:
        """Actions [envs, heads]: the planned germination [envs, slot and blueprint], else FOSSILIZE, ADVANCE, WAIT."""
        masks = legal(self._slots, self.space, self.rules)
        heads = {head.name: torch.zeros(len(germination), dtype=torch.int64) for head in self.space.heads}
        if "alpha_target" in heads:  # only a fully blended seed can be fossilised
            heads["alpha_target"] += self.layout.options["alpha_target"].index("FULL")
        for op in (Op.ADVANCE, Op.FOSSILIZE, Op.GERMINATE):  # a later op overrides an earlier one
            if op in self.space.ops:
                index = self.space.ops.index(op)
                is_possible, slot = masks.op[:, index], masks.slot[:, index].int().argmax(1)
                if op is Op.GERMINATE:
                    is_possible, slot = germination[:, 1] >= 0, germination[:, 0]
                heads["op"] = torch.where(is_possible, index, heads["op"])
                if "slot" in heads:
                    heads["slot"] = torch.where(is_possible, slot, heads["slot"])
        if "blueprint" in heads:
            heads["blueprint"] = germination[:, 1].clamp(min=0)
        return torch.stack(list(heads.values()), 1)

    def _describe(self, envs: int) -> Descriptors:
        """Slots that differ in depth only, and blueprints that differ in size only."""
        slots = len(self.space.slots)
        sizes = (self._sizes / HOST_PARAMETERS).tolist()
        candidates = torch.tensor([describe_candidate(size, size, (), 0) for size in sizes])
        even = torch.full((envs, slots), 1.0)
        return Descriptors(
            depth=(torch.arange(1, slots + 1) / (slots + 1)).expand(envs, -1),
            channels=even,
            resolution=even,
            cost=even / (slots + 1),
            candidates=candidates.expand(envs, slots, -1, -1),
        )

    def _seed_parameters(self, slots: Slots) -> Tensor:
        """Parameters of the current seeds: [envs, slots]; 0 without a seed."""
        return torch.where(slots.occupied, self._sizes[slots.blueprint.clamp(min=0)], 0.0)

    def _measure(self, slots: Slots, step: int, last: bool) -> HostMeasurements:
        """The measurements after `step` steps."""
        envs, slot_count = slots.stage.shape
        counted = slots.stage == Stage.FOSSILIZED if last else slots.occupied
        trained = 1 - torch.exp(-(slots.age + 1.0) / PACE)  # share of its gain that a seed has reached
        gain = self._gains[slots.blueprint.clamp(min=0), torch.arange(slot_count)] * trained
        share = torch.where(counted, slots.alpha * gain, 0.0)
        host_score = CHANCE_SCORE + (HOST_SCORE - CHANCE_SCORE) * (1 - torch.exp(torch.tensor(-step / PACE)))
        score = host_score + share.sum(1) + self._score_noise[:, step]
        missing, missing_by_slot = torch.full((envs,), torch.nan), torch.full((envs, slot_count), torch.nan)
        blended = slots.live & (slots.alpha > 0)
        return HostMeasurements(
            train_loss=missing,
            train_accuracy=missing,
            loss=1 - score / 100,
            accuracy=score / 100,
            score=score,
            gradient_norm=missing,
            health=torch.ones(envs),
            parameters=HOST_PARAMETERS + (self._seed_parameters(slots) * counted).sum(1),
            flops=torch.zeros(envs, dtype=torch.float64),
            contribution=torch.where(blended, share, torch.nan),
            loss_contribution=torch.where(blended, share / 100, torch.nan),
            progress=missing_by_slot,
            seed_gradient_norm=missing_by_slot,
            seed_health=torch.where(slots.live, 1.0, torch.nan),
            isolated_gain=missing_by_slot,
        )
