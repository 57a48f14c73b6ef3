"""Growth by chance."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from esper.environment import Observation
from esper.lifecycle import ActionSpace, Masks, Op
from esper.seeding import generator

ROUNDS = 500  # of the fit of rates, which gains digits geometrically


class Chance:
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

    def begin(self, seeds: Sequence[int]) -> list[torch.Generator]:
        return [generator("action noise", seed) for seed in seeds]

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


def fitted_rates(choices: Sequence[tuple[Collection[str], str]]) -> dict[str, float]:
    """Rates with which chance, where the given choices were made, would choose each op as often as they do.

    A choice is the ops that were legal, and the one that was taken. What is rarely legal must weigh more to be taken
    as often; these weights are the likeliest of a choice by weights (Luce), found by Hunter's iteration.
    """
    taken = {op: sum(chosen == op for _, chosen in choices) for op in sorted({chosen for _, chosen in choices})}
    rates = dict.fromkeys(taken, 1.0)
    for _ in range(ROUNDS):
        sums = [sum(rates.get(op, 0.0) for op in legal) for legal, _ in choices]
        shares = {
            op: sum(1 / total for (legal, _), total in zip(choices, sums, strict=True) if op in legal) for op in taken
        }
        rates = {op: taken[op] / shares[op] for op in taken}
        total = sum(rates.values())
        rates = {op: rate / total for op, rate in rates.items()}
    return rates
