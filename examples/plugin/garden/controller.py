"""A controller of one's own: it sees the same as every other, and answers with an action for each environment."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.controllers import is_legal, make_action
from esper.lifecycle import ActionSpace, Op
from esper.observation import Observation


class Gardener:
    """Germinates one blueprint wherever it can, and fossilises as soon as it may."""

    flops = 0

    def __init__(self, space: ActionSpace, blueprint: str) -> None:
        self._space, self._blueprint = space, blueprint

    def begin(self, episode_seeds: Sequence[int]) -> None:
        return None

    def act(self, observation: Observation, memory: None) -> tuple[Tensor, None]:
        return torch.stack([self._one(observation, env) for env in range(len(observation.base))]), None

    def _one(self, observation: Observation, env: int) -> Tensor:
        for op in (Op.FOSSILIZE, Op.GERMINATE):
            for slot in self._space.slots:
                if is_legal(self._space, observation.masks, env, op, slot):
                    return make_action(self._space, op, slot=slot, blueprint=self._blueprint)
        return make_action(self._space, Op.WAIT)
