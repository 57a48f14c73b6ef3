"""Growth at intervals that the gap between training and validation sets."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from esper.controllers.controller import first_available, is_legal, make_action, wait_action
from esper.lifecycle import ActionSpace, Blend, Op
from esper.observation import Observation


class FragrowController:
    """Grows often while the host generalises, and seldom once it overfits; all that is grown is kept.

    The interval between germinations is Imax / (1 + e^(4 - gap)), where gap is training less validation accuracy, in
    points.

    Arguments:
        space: the action space
        blueprint: the first of these that the host can have
        longest: Imax, as a share of the episode
        latest: share of the episode after which nothing germinates, for a seed needs time to become a fossil
    """

    flops = 0

    def __init__(self, space: ActionSpace, *, blueprint: Sequence[str], max_interval: float, latest: float) -> None:
        self._space, self._blueprint = space, first_available(space, blueprint)
        self._longest, self._latest = max_interval, latest

    def begin(self, episode_seeds: Sequence[int]) -> list[int]:
        return [0] * len(episode_seeds)  # the step of the latest germination, or the beginning

    def act(self, observation: Observation, memory: list[int]) -> tuple[Tensor, list[int]]:
        pairs = [self._one(observation, env, latest) for env, latest in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [latest for _, latest in pairs]

    def _one(self, observation: Observation, env: int, latest: int) -> tuple[Tensor, int]:
        space, view, masks = self._space, observation.view, observation.masks
        for op in (Op.FOSSILIZE, Op.ADVANCE):
            for slot in space.slots:
                if is_legal(space, masks, env, op, slot):
                    return make_action(space, op, slot=slot), latest
        gap = 100 * (view.now.train_accuracy[env] - view.now.accuracy[env]).item()
        due = latest + interval(gap, self._longest * view.steps)
        free = [slot for slot in space.slots if is_legal(space, masks, env, Op.GERMINATE, slot)]
        if not free or not due <= view.step <= self._latest * view.steps:  # the gap is NaN before the first step
            return wait_action(space), latest
        action = make_action(space, Op.GERMINATE, slot=free[0], blueprint=self._blueprint, blend=Blend.ADD.name)
        return action, view.step


def interval(gap: float, max_interval: float) -> float:
    """Steps between germinations, for a gap in points."""
    return max_interval / (1 + math.exp(min(4 - gap, 700.0)))  # e^710 is more than a float holds
