"""A custom controller: it reads the same observation as every controller and returns an action for each environment."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.controllers import is_legal, make_action
from esper.lifecycle import ActionSpace, Op
from esper.observation import Observation


class CustomController:
    """Germinates one blueprint in every free slot, and fossilises each seed as soon as that is legal.

    Arguments:
        space: the ops, slots and blueprints to choose from
        blueprint: the blueprint of every seed
    """

    flops = 0

    def __init__(self, space: ActionSpace, blueprint: str) -> None:
        self._space, self._blueprint = space, blueprint

    def begin(self, episode_seeds: Sequence[int]) -> None:
        return None

    def act(self, observation: Observation, memory: None) -> tuple[Tensor, None]:
        return torch.stack([self._choose(observation, env) for env in range(len(observation.base))]), None

    def _choose(self, observation: Observation, env: int) -> Tensor:
        for op in (Op.FOSSILIZE, Op.GERMINATE):
            for slot in self._space.slots:
                if is_legal(self._space, observation.masks, env, op, slot):
                    return make_action(self._space, op, slot=slot, blueprint=self._blueprint)
        return make_action(self._space, Op.WAIT)
