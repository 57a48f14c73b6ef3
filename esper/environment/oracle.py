"""An environment whose score is a known formula of the seeds.

The best possible score is known, so a failure to learn is a fault of the learner and not of the task. A thousand
episodes take seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from itertools import permutations, product

import torch
from torch import Tensor

from esper.arguments import Count
from esper.environment.formula import CHANCE_SCORE, HOST_PARAMETERS, FormulaEnvironment, counted_seeds
from esper.environment.record import StepRecord
from esper.environment.step import RewardResult
from esper.lifecycle import ActionSpace, Op, Rules, Slots, legal
from esper.observation import Descriptors, HostMeasurements, describe_candidate
from esper.rng import make_generator

HOST_SCORE = 30.0  # points that a host without seeds reaches
PACE = 5.0  # time constant in steps: after it, hosts and seeds have 63% of their final score


class Oracle(FormulaEnvironment):
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
    rent = 1.0

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
        super().__init__(space=space, rules=rules, reward=reward, envs=envs, steps=steps, features="absolute")
        self._noise = noise
        self._gains = torch.tensor([list(gains[name]) for name in space.blueprints])  # [blueprints, slots]
        self._sizes = torch.tensor([float(sizes[name]) for name in space.blueprints]) * HOST_PARAMETERS

    def _start(self, episode_seeds: Sequence[int]) -> Slots:
        draws = [
            torch.randn(self.steps + 1, generator=make_generator("oracle", episode_seed))
            for episode_seed in episode_seeds
        ]
        self._score_noise = self._noise * torch.stack(draws)  # [envs, steps + 1]
        return Slots.empty(len(episode_seeds), len(self.space.slots))

    def optimum(self) -> float:
        """The highest score that any controller can reach, without noise.

        Earlier seeds are worth more, so the best plan germinates one seed in each of the first steps and fossilises it
        as soon as possible. This method tries all choices of seeds in all orders. It does not know plans with seeds in
        all slots at once.
        """
        if self.space.all_slots:
            raise ValueError("actions.all_slots=true: must be false, so that the optimum of an oracle is known.")
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
        return torch.where(slots.occupied, self._sizes[slots.blueprint.clamp(min=0)], 0.0)

    def _measure(self, slots: Slots, step: int, last: bool) -> HostMeasurements:
        trained = 1 - torch.exp(-(slots.age + 1.0) / PACE)  # share of its gain that a seed has reached
        gain = self._gains[slots.blueprint.clamp(min=0), torch.arange(slots.stage.shape[1])] * trained
        share = torch.where(counted_seeds(slots, last), slots.alpha * gain, 0.0)
        host_score = CHANCE_SCORE + (HOST_SCORE - CHANCE_SCORE) * (1 - torch.exp(torch.tensor(-step / PACE)))
        score = host_score + share.sum(1) + self._score_noise[:, step]
        return self._measurements(
            slots, last, score=score, loss=1 - score / 100, contribution=share, loss_contribution=share / 100
        )
