"""Random growth."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.lifecycle import ActionSpace, Masks, Op, Rules, SeedMeasurements, Slots, apply, legal, tick
from esper.observation import Observation
from esper.rng import make_generator

CALIBRATION_ITERATIONS = 30
CALIBRATION_EPISODES = 256  # in each iteration
MIN_RATE = 1e-6  # of an op with a target count above 0
SMALL_COUNT = 0.01  # ops per episode; bounds the factor of an op that is never taken


class RandomController:
    """Samples op, slot and every other head among the legal options.

    Arguments:
        space: the action space
        rates: relative probabilities of the legal ops, by name; an op that is not named has 0, and WAIT is taken if all
            legal ops have 0. None makes all legal actions equally likely
    """

    flops = 0

    def __init__(self, space: ActionSpace, rates: Mapping[str, float] | None = None) -> None:
        self._space = space
        self._rates = None if rates is None else torch.tensor([float(rates.get(op.name, 0)) for op in space.ops])

    def begin(self, episode_seeds: Sequence[int]) -> list[torch.Generator]:
        return [make_generator("action noise", episode_seed) for episode_seed in episode_seeds]

    def act(self, observation: Observation, memory: list[torch.Generator]) -> tuple[Tensor, list[torch.Generator]]:
        masks = observation.masks
        return torch.stack([self._act_in(masks, env, generator) for env, generator in enumerate(memory)]), memory

    def _act_in(self, masks: Masks, env: int, generator: torch.Generator) -> Tensor:
        space = self._space
        weights = (self._count_actions(masks, env) if self._rates is None else self._rates) * masks.op[env]
        op = _sample(weights, generator) if weights.sum() > 0 else space.ops.index(Op.WAIT)
        columns = [op]
        for head in space.heads[1:]:
            mask = masks.slot[env, op] if head.name == "slot" else masks.others[head.name][env]
            columns.append(_sample(mask.float(), generator) if space.ops[op] in head.ops else 0)
        return torch.tensor(columns)

    def _count_actions(self, masks: Masks, env: int) -> Tensor:
        """The number of actions with each op: [ops]."""
        counts = torch.ones(len(self._space.ops))
        for head in self._space.heads[1:]:
            used = torch.tensor([op in head.ops for op in self._space.ops])
            options = masks.slot[env].sum(-1) if head.name == "slot" else masks.others[head.name][env].sum()
            counts *= torch.where(used, options, torch.ones_like(counts))
        return counts


def _sample(weights: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=generator))


def calibrate_rates(
    space: ActionSpace, rules: Rules, steps: int, wanted: Mapping[str, float], exists: Tensor | None = None
) -> dict[str, float]:
    """Rates with which a RandomController takes each op as often as `wanted`, on average over episodes.

    An op that is rarely legal needs a higher rate, and what is legal depends on the ops before. So this function
    simulates random episodes without hosts and adjusts the rates until the counts match. An op that cannot be taken
    that often is taken as often as possible.

    Arguments:
        space, rules: the action space and the lifecycle rules
        steps: decisions in an episode
        wanted: ops per episode, by name
        exists: bool [episodes, slots], the slots of the hosts whose episodes are simulated in turn; None is all slots
    """
    target = torch.tensor([float(wanted.get(op.name, 0.0)) for op in space.ops])
    rates = target / target.sum()
    for _ in range(CALIBRATION_ITERATIONS):
        counts = _simulate_counts(space, rules, steps, rates, exists)
        rates = rates * ((target + SMALL_COUNT) / (counts + SMALL_COUNT)).sqrt()  # the root damps oscillation
        rates = (rates / rates.sum()).clamp(min=MIN_RATE) * (target > 0)
    return {op.name: rate for op, rate in zip(space.ops, rates.tolist(), strict=True) if rate > 0}


def _simulate_counts(
    space: ActionSpace, rules: Rules, steps: int, rates: Tensor, exists: Tensor | None = None
) -> Tensor:
    """Mean count of each op in simulated episodes without a host: [ops]. Every call uses the same random numbers."""
    generator = make_generator("calibration", 0)
    rows = None if exists is None else exists[torch.arange(CALIBRATION_EPISODES) % len(exists)]
    slots = Slots.empty(CALIBRATION_EPISODES, len(space.slots), exists=rows)
    counts = torch.zeros(len(space.ops))
    only_wait = torch.eye(len(space.ops))[space.ops.index(Op.WAIT)]
    measured = SeedMeasurements(torch.zeros_like(slots.alpha), torch.ones_like(slots.alpha))
    for _ in range(steps):
        masks = legal(slots, space, rules)
        weights = rates * masks.op
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, only_wait)
        op = torch.multinomial(weights, 1, generator=generator)[:, 0]
        columns = [op]
        for head in space.heads[1:]:
            mask = masks.under(head.name, op).float()
            mask = torch.where(mask.sum(1, keepdim=True) > 0, mask, torch.ones_like(mask))
            columns.append(torch.multinomial(mask, 1, generator=generator)[:, 0])
        counts += torch.bincount(op, minlength=len(counts)) / CALIBRATION_EPISODES
        slots, _ = apply(slots, torch.stack(columns, 1), space, rules)
        slots, _ = tick(slots, measured, space, rules)
    return counts
