"""Growth without a host: the same slots, actions, features and rewards, but a score that is written down.

What the best controller would reach is known, so it tells a learner that does not learn from a task that cannot be
learned; and a thousand episodes take seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import permutations, product

import torch
from torch import Tensor

from esper.environment.record import StepRecord, net_score
from esper.environment.step import GrowthStep, RewardResult
from esper.lifecycle import ActionSpace, Layout, Op, Rules, SeedMeasurements, Slots, Stage, apply, legal, tick
from esper.observation import HostMeasurements, Observation, View, first_view, next_view, observe
from esper.observation.features import BASE_WIDTH, SLOT_WIDTH
from esper.rng import derive_seed, make_generator

HOST_PARAMETERS = 1_000.0  # parameters
CHANCE_SCORE, HOST_SCORE = 10.0, 30.0  # points at the start, and that the host alone comes to
PACE = 5.0  # steps in which host and seeds come a good half of their way


class Oracle:
    """N episodes whose score is what the host has learned by itself plus what each seed that is blended in has.

    A seed's share is alpha x its gain x (1 - e^(-age / PACE)), so that a seed is worth more the earlier it comes. At
    the end only fossils count. A little noise on what is measured follows from an episode's seed.

    Arguments:
        space, rules: what may be done, and when
        reward: pays for a step
        envs, steps: how many episodes at once, and their length
        gains: points that each blueprint brings in each slot in the end, by blueprint, in the order of the slots
        sizes: parameters of each blueprint, in hosts
        noise: deviation of each measured score, in points
    """

    name = "oracle"

    def __init__(
        self,
        *,
        space: ActionSpace,
        rules: Rules,
        reward: Callable[[StepRecord], RewardResult],
        envs: int,
        steps: int,
        gains: Mapping[str, Sequence[float]],
        sizes: Mapping[str, float],
        noise: float,
    ) -> None:
        for key, table in (("gains", gains), ("sizes", sizes)):
            if missing := [name for name in space.blueprints if name not in table]:
                raise ValueError(f"environment.{key}: must have an entry for {', '.join(missing)}.")
        if wrong := [name for name in space.blueprints if len(gains[name]) != len(space.slots)]:
            raise ValueError(f"environment.gains.{wrong[0]}: must have an entry for each of {', '.join(space.slots)}.")
        self.space, self.rules, self.envs, self.steps = space, rules, envs, steps
        self.layout = Layout.from_space(space, BASE_WIDTH, SLOT_WIDTH)
        self._reward, self._noise = reward, noise
        self._gains = torch.tensor([list(gains[name]) for name in space.blueprints])  # [blueprints, slots]
        self._sizes = torch.tensor([float(sizes[name]) for name in space.blueprints]) * HOST_PARAMETERS

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        return derive_seed(purpose, run_seed, index)

    def reset(self, episode_seeds: Sequence[int]) -> Observation:
        """Begin an episode for each seed."""
        draws = [
            torch.randn(self.steps + 1, generator=make_generator("oracle", episode_seed))
            for episode_seed in episode_seeds
        ]
        self._drawn = self._noise * torch.stack(draws)
        self._slots = Slots.empty(len(episode_seeds), len(self.space.slots))
        self._host = torch.full((len(episode_seeds),), HOST_PARAMETERS)
        now = self._measured(self._slots, 0, False)
        self._initial = now.score
        self._view = first_view(self.steps, self._slots, now, self._host)
        return observe(self._view, legal(self._slots, self.space, self.rules))

    def step(self, action: Tensor) -> GrowthStep:
        """One decision in each environment: int64 [envs, heads]."""
        before, earlier, step = self._slots, self._view.now, self._view.step
        last = step + 1 == self.steps
        decision = self.space.decode(action.cpu())
        during, applied = apply(before, action.cpu(), self.space, self.rules)
        now = self._measured(during, step + 1, last)
        after, ticked = tick(during, SeedMeasurements(now.contribution, now.seed_health), self.space, self.rules)
        nothing = torch.zeros_like(decision.op)
        record = StepRecord(
            step=step,
            steps=self.steps,
            decision=decision,
            before=before,
            during=during,
            after=after,
            entered=applied.entered | ticked.entered,
            earlier=earlier,
            now=now,
            initial_score=self._initial,
            host_parameters=self._host,
            seed_parameters=self._parameters(during),
            rollback=nothing,
            terminated=torch.full_like(nothing, last, dtype=torch.bool),
            truncated=torch.zeros_like(nothing, dtype=torch.bool),
        )
        rewarded = self._reward(record)
        self._slots = after
        there = self._parameters(after)
        self._view = next_view(self._view, after, now, there, decision.op, decision.slot, nothing.bool())
        observation = observe(self._view, legal(after, self.space, self.rules))
        return GrowthStep(observation, rewarded.total, rewarded, record.terminated, record.truncated, record)

    def outcome(self) -> dict[str, Tensor]:
        """What the episodes have come to so far: figures [envs]."""
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
        """The highest score that any controller can reach, noise aside.

        A seed is worth more the earlier it comes, so the best plan germinates what pays, one seed in each of the first
        steps, and fossilises as soon as it may; which seeds, and in which order, is tried out in full.
        """
        slots, options = range(len(self.space.slots)), (-1, *range(len(self.space.blueprints)))
        plans = torch.tensor(
            [
                list(zip(order, chosen, strict=True))
                for order in permutations(slots)
                for chosen in product(options, repeat=len(slots))
            ]
        )  # [plans, germinations, slot and blueprint], blueprint -1 for none
        quiet = copy(self)
        quiet._noise = 0.0
        quiet.reset([0] * len(plans))
        for step in range(self.steps):
            quiet.step(quiet._planned(plans[:, step] if step < len(slots) else torch.full_like(plans[:, 0], -1)))
        return float(quiet.outcome()["score"].max())

    def _planned(self, germination: Tensor) -> Tensor:
        """Actions [envs, heads]: a germination [envs, slot and blueprint] that is planned, else what moves seeds on."""
        masks = legal(self._slots, self.space, self.rules)
        heads = {head.name: torch.zeros(len(germination), dtype=torch.int64) for head in self.space.heads}
        for op in (Op.ADVANCE, Op.FOSSILIZE, Op.GERMINATE):  # the last that can be done is done
            if op in self.space.ops:
                index = self.space.ops.index(op)
                may, slot = masks.op[:, index], masks.slot[:, index].int().argmax(1)
                if op is Op.GERMINATE:
                    may, slot = germination[:, 1] >= 0, germination[:, 0]
                heads["op"] = torch.where(may, index, heads["op"])
                if "slot" in heads:
                    heads["slot"] = torch.where(may, slot, heads["slot"])
        if "blueprint" in heads:
            heads["blueprint"] = germination[:, 1].clamp(min=0)
        return torch.stack(list(heads.values()), 1)

    def _parameters(self, slots: Slots) -> Tensor:
        """Of the seeds that are there: [envs, slots]."""
        return torch.where(slots.occupied, self._sizes[slots.blueprint.clamp(min=0)], 0.0)

    def _measured(self, slots: Slots, epochs: int, last: bool) -> HostMeasurements:
        """What is known after so many epochs."""
        envs, places = slots.stage.shape
        counted = slots.stage == Stage.FOSSILIZED if last else slots.occupied
        ripe = 1 - torch.exp(-(slots.age + 1.0) / PACE)
        gain = self._gains[slots.blueprint.clamp(min=0), torch.arange(places)] * ripe
        share = torch.where(counted, slots.alpha * gain, 0.0)
        alone = CHANCE_SCORE + (HOST_SCORE - CHANCE_SCORE) * (1 - torch.exp(torch.tensor(-epochs / PACE)))
        score = alone + share.sum(1) + self._drawn[:, epochs]
        nothing, none = torch.full((envs,), torch.nan), torch.full((envs, places), torch.nan)
        blended = slots.live & (slots.alpha > 0)
        return HostMeasurements(
            train_loss=nothing,
            train_accuracy=nothing,
            loss=1 - score / 100,
            accuracy=score / 100,
            score=score,
            gradient_norm=nothing,
            health=torch.ones(envs),
            parameters=HOST_PARAMETERS + (self._parameters(slots) * counted).sum(1),
            flops=torch.zeros(envs, dtype=torch.float64),
            contribution=torch.where(blended, share, torch.nan),
            progress=none,
            seed_gradient_norm=none,
            seed_health=torch.where(slots.live, 1.0, torch.nan),
            isolated_gain=none,
        )
