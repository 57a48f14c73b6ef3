"""Both ways between gymnasium and us.

`GrowthEnv` is one growing host as a gymnasium environment: `gymnasium.make("esper/Growth-v0")`, after
`import esper.gym`. `Gymnasium` plays any gymnasium environment with discrete actions for our collector.

The actions of `GrowthEnv` are flat, because masks over several discrete factors cannot express which pairs are legal;
`action_masks()` says which are, in the form that MaskablePPO of sb3-contrib asks for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Discrete

from esper.config import build_environment, check_config, compose_config
from esper.lifecycle import ActionSpace, Layout, Masks
from esper.observation import Observation, PolicyInputs
from esper.rng import derive_seed

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
        check_config(config)
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
        episode = derive_seed("gym", int(self.np_random.integers(2**62)))
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


@dataclass(frozen=True)
class GymnasiumStep:
    """What comes of a decision in every environment; those whose episode was over before are paid nothing."""

    observation: PolicyInputs
    reward: torch.Tensor  # [envs]
    terminated: torch.Tensor  # bool [envs]
    truncated: torch.Tensor  # bool [envs]


class GymnasiumVectorEnv:
    """N gymnasium environments for our collector, one episode in each.

    Masks are those of the environment's `action_masks()`, or all true where it has none.

    Arguments:
        name: as gymnasium.make takes it
        envs: how many side by side
        steps: of an episode at most, after which it is truncated; None is the environment's own limit
        keep: which features are shown, by index; None is all of them
    """

    def __init__(self, name: str, *, envs: int, steps: int | None, features: Sequence[int] | None) -> None:
        if envs < 1:
            raise ValueError(f"environment.envs={envs}: must be at least 1.")
        if steps is not None and steps < 1:
            raise ValueError(f"environment.steps={steps}: must be at least 1, or null for the environment's own.")
        try:
            self._games = [gymnasium.make(name, max_episode_steps=steps) for _ in range(envs)]
        except gymnasium.error.Error as error:
            raise ValueError(f"environment.name={name}: {error}") from None
        game = self._games[0]
        limit = steps or (game.spec.max_episode_steps if game.spec else None)
        actions, shown = game.action_space, game.observation_space
        if limit is None:
            raise ValueError(f"environment.steps=null: {name} has no limit of its own; give one.")
        if not isinstance(actions, Discrete) or not isinstance(shown, Box) or len(shown.shape) != 1:
            raise ValueError(f"environment.name={name}: must have discrete actions and a flat box of features.")
        self._features = list(range(shown.shape[0])) if features is None else list(features)
        if not self._features or not all(0 <= index < shown.shape[0] for index in self._features):
            raise ValueError(
                f"environment.features={self._features}: must be among the {shown.shape[0]} features from 0."
            )
        options = tuple(str(index) for index in range(int(actions.n)))
        self.layout = Layout(len(self._features), 0, (name,), (), {"op": options}, {"op": options})
        self.name, self.envs, self.steps, self._first = name, envs, int(limit), int(actions.start)

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        return derive_seed(purpose, run_seed, index)

    def reset(self, episode_seeds: Sequence[int]) -> PolicyInputs:
        """Begin an episode in each environment."""
        if len(episode_seeds) != self.envs:
            raise ValueError(f"episode_seeds: {len(episode_seeds)} were given for environment.envs={self.envs}.")
        self._seen = [
            game.reset(seed=episode_seed)[0] for game, episode_seed in zip(self._games, episode_seeds, strict=True)
        ]
        self._over, self._returns = [False] * self.envs, torch.zeros(self.envs)
        return self._inputs()

    def step(self, action: torch.Tensor) -> GymnasiumStep:
        """One decision [envs, 1] in every environment whose episode is not over."""
        reward = torch.zeros(self.envs)
        ends = torch.zeros(2, self.envs, dtype=torch.bool)
        for env, option in enumerate(action[:, 0].tolist()):
            if not self._over[env]:
                self._seen[env], paid, terminated, truncated, _ = self._games[env].step(option + self._first)
                reward[env] = float(paid)
                ends[:, env] = torch.tensor([terminated, truncated and not terminated])
                self._over[env] = bool(terminated or truncated)
        self._returns += reward
        return GymnasiumStep(self._inputs(), reward, ends[0], ends[1])

    def outcome(self) -> dict[str, torch.Tensor]:
        return {"score": self._returns}

    def effort(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        for game in self._games:
            game.close()

    def _inputs(self) -> PolicyInputs:
        base = torch.from_numpy(np.stack(self._seen)[:, self._features]).float()
        op = torch.ones(self.envs, len(self.layout.ops), dtype=torch.bool)
        for env, game in enumerate(self._games):
            if game.has_wrapper_attr("action_masks") and not self._over[env]:
                op[env] = torch.from_numpy(np.asarray(game.get_wrapper_attr("action_masks")(), dtype=bool))
        nothing = torch.zeros(self.envs, 1, 0)
        masks = Masks(op, torch.zeros(*op.shape, 1, dtype=torch.bool), {})
        return PolicyInputs(base, nothing, torch.zeros(self.envs, 1, dtype=torch.int64), masks)


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="esper.gym:GrowthEnv")
