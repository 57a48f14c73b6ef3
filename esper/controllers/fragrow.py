"""Growth at intervals that depend on the gap between training and validation accuracy."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from esper.controllers.controller import first_available, is_legal, make_action, wait_action
from esper.lifecycle import ActionSpace, Blend, Op
from esper.observation import Observation


class FragrowController:
    """Germinates often while the host generalises and rarely once it overfits; fossilises every seed.

    The interval between germinations is max_interval / (1 + e^(4 - gap)), where gap is training minus validation
    accuracy in points.

    Arguments:
        space: the action space
        blueprint: blueprints in order of preference; the first that the action space has is used
        max_interval: longest interval between germinations, as a share of the episode
        latest: share of the episode after which no seed germinates, because a seed needs time to become a fossil
    """

    flops = 0

    def __init__(self, space: ActionSpace, *, blueprint: Sequence[str], max_interval: float, latest: float) -> None:
        self._space, self._blueprint = space, first_available(space, blueprint)
        self._max_interval, self._latest = max_interval, latest

    def begin(self, episode_seeds: Sequence[int]) -> list[int]:
        return [0] * len(episode_seeds)  # step of the latest germination; 0 before the first

    def act(self, observation: Observation, memory: list[int]) -> tuple[Tensor, list[int]]:
        pairs = [self._act_in(observation, env, latest) for env, latest in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [latest for _, latest in pairs]

    def _act_in(self, observation: Observation, env: int, latest: int) -> tuple[Tensor, int]:
        space, view, masks = self._space, observation.view, observation.masks
        for op in (Op.FOSSILIZE, Op.ADVANCE):
            for slot in space.slots:
                if is_legal(space, masks, env, op, slot):
                    return make_action(space, op, slot=slot), latest
        gap = 100 * (view.now.train_accuracy[env] - view.now.accuracy[env]).item()
        due = latest + interval(gap, self._max_interval * view.steps)
        free = [slot for slot in space.slots if is_legal(space, masks, env, Op.GERMINATE, slot)]
        if not free or not due <= view.step <= self._latest * view.steps:  # the gap is NaN before the first step
            return wait_action(space), latest
        action = make_action(space, Op.GERMINATE, slot=free[0], blueprint=self._blueprint, blend=Blend.ADD.name)
        return action, view.step


def interval(gap: float, max_interval: float) -> float:
    """Steps between germinations, for a gap in points."""
    return max_interval / (1 + math.exp(min(4 - gap, 700.0)))  # e^710 overflows a float
