"""Controllers that do not look: one that waits, and one that repeats."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.controllers.controller import is_legal, make_action, wait_action
from esper.lifecycle import ActionSpace, Op
from esper.observation import Observation


class NoGrowth:
    """Always waits: the host alone."""

    flops = 0

    def __init__(self, space: ActionSpace) -> None:
        self._space = space

    def begin(self, episode_seeds: Sequence[int]) -> None:
        return None

    def act(self, observation: Observation, memory: None) -> tuple[Tensor, None]:
        return wait_action(self._space).expand(len(observation.base), -1), None


class ReplayController:
    """Repeats a recorded episode's actions, whatever it sees; what is not legal at its time becomes WAIT."""

    flops = 0

    def __init__(self, space: ActionSpace, actions: Sequence[Mapping[str, str]]) -> None:
        """`actions` are a step's options by head, as episode records have them."""
        self._space = space
        known = {head.name: head.options for head in space.heads}
        for number, step in enumerate(actions):
            for head, option in step.items():
                if option not in known.get(head, ()):
                    allowed = ", ".join(known.get(head, ())) or "nothing"
                    raise ValueError(f"replay: step {number} has {head}={option}; this action space allows {allowed}.")
        self._actions = [
            make_action(space, Op[step["op"]], **{head: option for head, option in step.items() if head != "op"})
            for step in actions
        ]

    def begin(self, episode_seeds: Sequence[int]) -> None:
        return None

    def act(self, observation: Observation, memory: None) -> tuple[Tensor, None]:
        space, envs, step = self._space, len(observation.base), observation.view.step
        if step >= len(self._actions):
            return wait_action(space).expand(envs, -1), None
        action = self._actions[step]
        op, slot = space.ops[int(action[0])], space.slots[int(action[1])]
        waiting = wait_action(space)
        legal = [op is Op.WAIT or is_legal(space, observation.masks, env, op, slot) for env in range(envs)]
        return torch.stack([action if may else waiting for may in legal]), None
