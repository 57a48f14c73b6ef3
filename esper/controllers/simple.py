"""Controllers that ignore what they observe: NoGrowth waits, ReplayController repeats recorded actions."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.controllers.controller import is_legal, make_action, wait_action
from esper.lifecycle import ActionSpace, Op
from esper.observation import Observation


class NoGrowth:
    """Always waits, so the host trains without seeds."""

    flops = 0

    def __init__(self, space: ActionSpace) -> None:
        self._space = space

    def begin(self, episode_seeds: Sequence[int]) -> None:
        return None

    def act(self, observation: Observation, memory: None) -> tuple[Tensor, None]:
        return wait_action(self._space).expand(len(observation.base), -1), None


class ReplayController:
    """Repeats the actions of a recorded episode; an action that is not legal becomes WAIT.

    Arguments:
        space: the action space
        actions: for each step, the names of the options by head, as in StepEntry.action
    """

    flops = 0

    def __init__(self, space: ActionSpace, actions: Sequence[Mapping[str, str]]) -> None:
        self._space = space
        options = {head.name: head.options for head in space.heads}
        for number, step in enumerate(actions):
            for head, option in step.items():
                if head not in options:
                    raise ValueError(f"replay: step {number} has {head}={option}; heads are {', '.join(options)}.")
                if option not in options[head]:
                    allowed = ", ".join(options[head])
                    raise ValueError(f"replay: step {number} has {head}={option}; must be one of {allowed}.")
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
        op, slot = space.ops[int(action[0])], space.slot_options[int(action[1])]
        wait = wait_action(space)
        legal = [op is Op.WAIT or is_legal(space, observation.masks, env, op, slot) for env in range(envs)]
        return torch.stack([action if may_act else wait for may_act in legal]), None
