"""Random growth."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.lifecycle import (
    ALL_SLOTS,
    ActionSpace,
    Masks,
    Op,
    Rules,
    SeedMeasurements,
    Slots,
    apply,
    choice_name,
    legal,
    tick,
)
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
            legal ops have 0. Where the slot may be all of them, that has its own rate, such as `GERMINATE all`. None
            makes all legal actions equally likely
    """

    flops = 0

    def __init__(self, space: ActionSpace, rates: Mapping[str, float] | None = None) -> None:
        self._space = space
        self._rates = None if rates is None else torch.tensor([float(rates.get(name, 0)) for name in _choices(space)])

    def begin(self, episode_seeds: Sequence[int]) -> list[torch.Generator]:
        return [make_generator("action noise", episode_seed) for episode_seed in episode_seeds]

    def act(self, observation: Observation, memory: list[torch.Generator]) -> tuple[Tensor, list[torch.Generator]]:
        masks = observation.masks
        return torch.stack([self._act_in(masks, env, generator) for env, generator in enumerate(memory)]), memory

    def _act_in(self, masks: Masks, env: int, generator: torch.Generator) -> Tensor:
        space, own = self._space, masks.each(lambda mask: mask[env : env + 1])
        if self._rates is None:
            weights = self._count_actions(masks, env) * masks.op[env]
        else:
            weights = self._rates * _legal_choices(own, space)[0]
        choice = _sample(weights, generator) if weights.sum() > 0 else space.ops.index(Op.WAIT)
        op = choice % len(space.ops)
        columns = [op]
        for head in space.heads[1:]:
            mask = own.under(head.name, torch.tensor([op]))
            if head.name == "slot" and self._rates is not None:
                mask = _slot_options(own, torch.tensor([choice]), space)
            columns.append(_sample(mask[0].float(), generator) if space.ops[op] in head.ops else 0)
        return torch.tensor(columns)

    def _count_actions(self, masks: Masks, env: int) -> Tensor:
        """The number of actions with each op: [ops]."""
        counts = torch.ones(len(self._space.ops))
        for head in self._space.heads[1:]:
            used = torch.tensor([op in head.ops for op in self._space.ops])
            options = masks.slot[env].sum(-1) if head.name == "slot" else masks.others[head.name][env].sum()
            counts *= torch.where(used, options, torch.ones_like(counts))
        return counts


def _choices(space: ActionSpace) -> list[str]:
    """What has a rate: each op, and where the slot may be all of them, each op in all slots."""
    slots = (None, ALL_SLOTS) if space.all_slots else (None,)
    return [choice_name(op.name, slot) for slot in slots for op in space.ops]


def _legal_choices(masks: Masks, space: ActionSpace) -> Tensor:
    """Which choices are legal: bool [envs, choices]."""
    return torch.cat([masks.op, masks.slot[..., -1]], -1) if space.all_slots else masks.op


def _slot_options(masks: Masks, choice: Tensor, space: ActionSpace) -> Tensor:
    """The legal options of the slot head for each choice [envs]: bool [envs, options]."""
    mask = masks.under("slot", choice % len(space.ops))
    if not space.all_slots:
        return mask
    is_all = torch.arange(mask.shape[1]) == len(space.slots)
    return mask & (is_all == (choice >= len(space.ops)).unsqueeze(1))


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
        wanted: ops per episode, by name; those in all slots have their own, such as `GERMINATE all`
        exists: bool [episodes, slots], the slots of the hosts whose episodes are simulated in turn; None is all slots
    """
    names = _choices(space)
    target = torch.tensor([float(wanted.get(name, 0.0)) for name in names])
    rates = target / target.sum()
    for _ in range(CALIBRATION_ITERATIONS):
        counts = _simulate_counts(space, rules, steps, rates, exists)
        rates = rates * ((target + SMALL_COUNT) / (counts + SMALL_COUNT)).sqrt()  # the root damps oscillation
        rates = (rates / rates.sum()).clamp(min=MIN_RATE) * (target > 0)
    return {name: rate for name, rate in zip(names, rates.tolist(), strict=True) if rate > 0}


def _simulate_counts(
    space: ActionSpace, rules: Rules, steps: int, rates: Tensor, exists: Tensor | None = None
) -> Tensor:
    """Mean count of each choice in simulated episodes without a host: [choices].

    Every call uses the same random numbers.
    """
    generator = make_generator("calibration", 0)
    rows = None if exists is None else exists[torch.arange(CALIBRATION_EPISODES) % len(exists)]
    slots = Slots.empty(CALIBRATION_EPISODES, len(space.slots), exists=rows)
    counts = torch.zeros(len(rates))
    only_wait = torch.eye(len(rates))[space.ops.index(Op.WAIT)]
    measured = SeedMeasurements(torch.zeros_like(slots.alpha), torch.ones_like(slots.alpha))
    for _ in range(steps):
        masks = legal(slots, space, rules)
        weights = rates * _legal_choices(masks, space)
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, only_wait)
        choice = torch.multinomial(weights, 1, generator=generator)[:, 0]
        op = choice % len(space.ops)
        columns = [op]
        for head in space.heads[1:]:
            mask = _slot_options(masks, choice, space) if head.name == "slot" else masks.under(head.name, op)
            weights = torch.where(mask.any(1, keepdim=True), mask, True).float()
            columns.append(torch.multinomial(weights, 1, generator=generator)[:, 0])
        counts += torch.bincount(choice, minlength=len(counts)) / CALIBRATION_EPISODES
        slots, _ = apply(slots, torch.stack(columns, 1), space, rules)
        slots, _ = tick(slots, measured, space, rules)
    return counts
