"""One growing host as a gymnasium environment: `gymnasium.make("esper/Growth-v0")`, after `import esper.gym`.

Actions are flat, because masks over several discrete factors cannot express which pairs are legal; `action_masks()`
says which are, in the form that MaskablePPO of sb3-contrib asks for.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Discrete

from esper.config import build_environment, check, compose_config
from esper.environment import Observation
from esper.lifecycle import ActionSpace, Masks
from esper.seeding import derive

NAME = "esper/Growth-v0"
BOUND = 2.0  # features are scaled to about [-1, 1] and clipped here


def flat_actions(space: ActionSpace) -> torch.Tensor:
    """Every combination of an op with the options of the heads it uses: int64 [actions, heads]; unused heads are 0."""
    rows = []
    for index, op in enumerate(space.ops):
        options = [range(head.size) if op in head.ops else range(1) for head in space.heads[1:]]
        rows += [[index, *choice] for choice in product(*options)]
    return torch.tensor(rows)


def flat_mask(actions: torch.Tensor, masks: Masks, space: ActionSpace) -> torch.Tensor:
    """Which of the flat actions are legal in the first environment: bool [actions]."""
    op = actions[:, 0]
    slot = masks.slot[0, op, actions[:, 1]]
    needs_slot = space.uses()[op, 1]
    return masks.op[0, op] & (slot | ~needs_slot)


class GrowthEnv(gymnasium.Env[np.ndarray, np.int64]):
    """A single host run.

    Arguments:
        overrides: of the evaluation's configuration, as typed on its command line, `host=cifar_blind` for one
    """

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        config = compose_config("evaluate", overrides)
        check(config)
        self.environment = build_environment(config, 1)
        self._actions = flat_actions(self.environment.space)
        self._masks: Masks | None = None
        self.action_space = Discrete(len(self._actions))
        width = len(self._flat(self.environment.reset([0])))
        self.observation_space = Box(-BOUND, BOUND, (width,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        episode = derive("gym", int(self.np_random.integers(2**62)))
        return self._flat(self.environment.reset([episode])), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """An action that is not legal now counts as WAIT, the first of all actions, and `info` says so."""
        legal = bool(self.action_masks()[action])
        step = self.environment.step(self._actions[int(action) if legal else 0].unsqueeze(0))
        now = step.record.now
        info = {"score": now.score.item(), "loss": now.loss.item(), "parameters": now.parameters.item(), "legal": legal}
        return self._flat(step.observation), step.reward.item(), bool(step.terminated), bool(step.truncated), info

    def action_masks(self) -> np.ndarray:
        """Which actions are legal now: bool [actions]."""
        if self._masks is None:
            raise RuntimeError("call reset first.")
        return flat_mask(self._actions, self._masks, self.environment.space).numpy()

    def close(self) -> None:
        self.environment.close()

    def _flat(self, observation: Observation) -> np.ndarray:
        self._masks = observation.masks
        kinds = F.one_hot(observation.blueprints, len(self.environment.space.blueprints) + 1)
        parts = [observation.base[0], observation.slots[0].flatten(), kinds[0].flatten().float()]
        return torch.cat(parts).clamp(-BOUND, BOUND).numpy()


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="esper.gym:GrowthEnv")
