"""Growth by chance."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.lifecycle import ActionSpace, Masks, Op, Rules, SeedMeasurements, Slots, apply, legal, tick
from esper.observation import Observation
from esper.rng import make_generator

ROUNDS = 30  # of calibration
EPISODES = 256  # in each
LEAST = 1e-6  # rate of an op that is wanted at all
SMALL = 0.01  # ops an episode; keeps what never comes out from growing without bound


class RandomController:
    """Draws op, slot and every further head among what is legal.

    Arguments:
        space: the action space
        rates: how the ops that are legal weigh against each other, by name; an op that is not named is never drawn,
            and without one that can be, it waits. None makes all legal actions equally likely
    """

    flops = 0

    def __init__(self, space: ActionSpace, rates: Mapping[str, float] | None = None) -> None:
        self._space = space
        self._rates = None if rates is None else torch.tensor([float(rates.get(op.name, 0)) for op in space.ops])

    def begin(self, episode_seeds: Sequence[int]) -> list[torch.Generator]:
        return [make_generator("action noise", episode_seed) for episode_seed in episode_seeds]

    def act(self, observation: Observation, memory: list[torch.Generator]) -> tuple[Tensor, list[torch.Generator]]:
        masks = observation.masks
        return torch.stack([self._one(masks, env, draws) for env, draws in enumerate(memory)]), memory

    def _one(self, masks: Masks, env: int, draws: torch.Generator) -> Tensor:
        space = self._space
        weights = (self._counts(masks, env) if self._rates is None else self._rates) * masks.op[env]
        op = _draw(weights, draws) if weights.sum() > 0 else space.ops.index(Op.WAIT)
        columns = [op]
        for head in space.heads[1:]:
            mask = masks.slot[env, op] if head.name == "slot" else masks.others[head.name][env]
            columns.append(_draw(mask.float(), draws) if space.ops[op] in head.ops else 0)
        return torch.tensor(columns)

    def _counts(self, masks: Masks, env: int) -> Tensor:
        """How many actions each op stands for."""
        counts = torch.ones(len(self._space.ops))
        for head in self._space.heads[1:]:
            used = torch.tensor([op in head.ops for op in self._space.ops])
            options = masks.slot[env].sum(-1) if head.name == "slot" else masks.others[head.name][env].sum()
            counts *= torch.where(used, options, torch.ones_like(counts))
        return counts


def _draw(weights: Tensor, draws: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=draws))


def calibrate_rates(space: ActionSpace, rules: Rules, steps: int, wanted: Mapping[str, float]) -> dict[str, float]:
    """Rates with which chance takes each op as often as wanted, in the mean over episodes of so many steps.

    What is rarely legal must weigh more to be taken as often, and what is legal depends on what was taken before. So
    episodes of slots without hosts are played by chance, and rates moved until the ops come out as wanted; ops that
    cannot come out so often are taken as often as they can be.
    """
    target = torch.tensor([float(wanted.get(op.name, 0.0)) for op in space.ops])
    rates = target / target.sum()
    for _ in range(ROUNDS):
        taken = _taken(space, rules, steps, rates)
        rates = rates * ((target + SMALL) / (taken + SMALL)).sqrt()  # the root, lest it swings
        rates = (rates / rates.sum()).clamp(min=LEAST) * (target > 0)
    return {op.name: rate for op, rate in zip(space.ops, rates.tolist(), strict=True) if rate > 0}


def _taken(space: ActionSpace, rules: Rules, steps: int, rates: Tensor) -> Tensor:
    """How often each op is taken in an episode of slots without a host: [ops]; the same draws in every call."""
    draws = make_generator("calibration", 0)
    slots = Slots.empty(EPISODES, len(space.slots))
    count = torch.zeros(len(space.ops))
    waits = torch.eye(len(space.ops))[space.ops.index(Op.WAIT)]
    measured = SeedMeasurements(torch.zeros_like(slots.alpha), torch.ones_like(slots.alpha))
    for _ in range(steps):
        masks = legal(slots, space, rules)
        weights = rates * masks.op
        op = torch.multinomial(torch.where(weights.sum(1, keepdim=True) > 0, weights, waits), 1, generator=draws)[:, 0]
        columns = [op]
        for head in space.heads[1:]:
            mask = masks.under(head.name, op).float()
            mask = torch.where(mask.sum(1, keepdim=True) > 0, mask, torch.ones_like(mask))
            columns.append(torch.multinomial(mask, 1, generator=draws)[:, 0])
        count += torch.bincount(op, minlength=len(count)) / EPISODES
        slots, _ = apply(slots, torch.stack(columns, 1), space, rules)
        slots, _ = tick(slots, measured, space, rules)
    return count
