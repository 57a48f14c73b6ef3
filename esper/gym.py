"""Gymnasium: a growing host as a gymnasium environment, and gymnasium environments for the collector.

`GrowthEnv` is one growing host: `gymnasium.make("esper/Growth-v0")`, after `import esper.gym`. `GymnasiumVectorEnv`
runs any gymnasium environment with discrete actions in the collector.

The actions of `GrowthEnv` are flat, because masks over several discrete factors cannot express which pairs are legal;
`action_masks()` returns the legal ones, in the form that MaskablePPO of sb3-contrib expects.
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
from esper.plugins import import_user_module
from esper.rng import derive_seed

NAME = "esper/Growth-v0"
BOUND = 2.0  # features are scaled to about [-1, 1]; outliers are clipped


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
        overrides: overrides of the configuration of `esper.evaluate`, such as `host=cifar_blind`
    """

    def __init__(self, overrides: Sequence[str] = ()) -> None:
        config = compose_config("evaluate", overrides)
        check_config(config)
        self.environment = build_environment(config, 1)
        self._actions = flat_actions(self.environment.space)
        self._masks: Masks | None = None
        self.action_space = Discrete(len(self._actions))
        width = len(self._flatten(self.environment.reset([0])))
        self.observation_space = Box(-BOUND, BOUND, (width,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        episode_seed = derive_seed("gym", int(self.np_random.integers(2**62)))
        return self._flatten(self.environment.reset([episode_seed])), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Take an action. An illegal one counts as WAIT, the first action; `info["legal"]` is then false."""
        legal = bool(self.action_masks()[action])
        step = self.environment.step(self._actions[int(action) if legal else 0].unsqueeze(0))
        now = step.record.now
        info = {"score": now.score.item(), "loss": now.loss.item(), "parameters": now.parameters.item(), "legal": legal}
        return self._flatten(step.observation), step.reward.item(), bool(step.terminated), bool(step.truncated), info

    def action_masks(self) -> np.ndarray:
        """Which actions are legal now: bool [actions]."""
        if self._masks is None:
            raise RuntimeError("call reset first.")
        return flat_mask(self._actions, self._masks, self.environment.space).numpy()

    def close(self) -> None:
        self.environment.close()

    def _flatten(self, observation: Observation) -> np.ndarray:
        self._masks = observation.masks
        blueprints = F.one_hot(observation.blueprints, len(self.environment.space.blueprints) + 1)
        parts = [observation.base[0], observation.slots[0].flatten(), blueprints[0].flatten().float()]
        return torch.cat(parts).clamp(-BOUND, BOUND).numpy()


@dataclass(frozen=True)
class GymnasiumStep:
    """The result of one step in every environment; the reward is 0 where the episode ended before."""

    observation: PolicyInputs
    reward: torch.Tensor  # [envs]
    terminated: torch.Tensor  # bool [envs]
    truncated: torch.Tensor  # bool [envs]


class GymnasiumVectorEnv:
    """N gymnasium environments for the collector, one episode in each.

    Masks are those of the environment's `action_masks()`, or all true if it has none.

    Arguments:
        name: id of an environment with discrete actions and a flat box of features, for gymnasium.make; `module:id`
            imports a module that registers it
        envs: number of environments
        steps: maximum length of an episode, after which it is truncated; None = the environment's own limit
        features: indices of the features in the observation; None = all
    """

    def __init__(self, name: str, *, envs: int, steps: int | None, features: Sequence[int] | None) -> None:
        if envs < 1:
            raise ValueError(f"environment.envs={envs}: must be at least 1.")
        if steps is not None and steps < 1:
            raise ValueError(f"environment.steps={steps}: must be at least 1, or null for the environment's own limit.")
        _import_modules(name)
        try:
            self._envs = [gymnasium.make(name, max_episode_steps=steps) for _ in range(envs)]
        except gymnasium.error.Error as error:
            raise ValueError(f"environment.name={name}: {error}") from None
        first = self._envs[0]
        limit = steps or (first.spec.max_episode_steps if first.spec else None)
        actions, observations = first.action_space, first.observation_space
        if limit is None:
            raise ValueError(f"environment.steps=null: must be a number, since {name} has no limit of its own.")
        if not isinstance(actions, Discrete) or not isinstance(observations, Box) or len(observations.shape) != 1:
            raise ValueError(f"environment.name={name}: must have discrete actions and a flat box of features.")
        width = observations.shape[0]
        self._features = list(range(width)) if features is None else list(features)
        if not self._features or not all(0 <= index < width for index in self._features):
            raise ValueError(f"environment.features={self._features}: must be indices from 0 to {width - 1}.")
        options = tuple(str(index) for index in range(int(actions.n)))
        self.layout = Layout(len(self._features), 0, (name,), (), {"op": options}, {"op": options})
        self.name, self.envs, self.steps, self._first_action = name, envs, int(limit), int(actions.start)

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        return derive_seed(purpose, run_seed, index)

    def reset(self, episode_seeds: Sequence[int]) -> PolicyInputs:
        """Begin an episode in each environment."""
        if len(episode_seeds) != self.envs:
            raise ValueError(f"episode_seeds: must be {self.envs} (environment.envs), not {len(episode_seeds)}.")
        self._observations = [
            env.reset(seed=episode_seed)[0] for env, episode_seed in zip(self._envs, episode_seeds, strict=True)
        ]
        self._ended, self._returns = [False] * self.envs, torch.zeros(self.envs)
        return self._inputs()

    def step(self, action: torch.Tensor) -> GymnasiumStep:
        """Take an action [envs, 1] in every environment whose episode has not ended."""
        reward = torch.zeros(self.envs)
        ends = torch.zeros(2, self.envs, dtype=torch.bool)
        for index, option in enumerate(action[:, 0].tolist()):
            if not self._ended[index]:
                result = self._envs[index].step(option + self._first_action)
                self._observations[index], amount, terminated, truncated, _ = result
                reward[index] = float(amount)
                ends[:, index] = torch.tensor([terminated, truncated and not terminated])
                self._ended[index] = bool(terminated or truncated)
        self._returns += reward
        return GymnasiumStep(self._inputs(), reward, ends[0], ends[1])

    def outcome(self) -> dict[str, torch.Tensor]:
        return {"score": self._returns}

    def effort(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _inputs(self) -> PolicyInputs:
        base = torch.from_numpy(np.stack(self._observations)[:, self._features]).float()
        op = torch.ones(self.envs, len(self.layout.ops), dtype=torch.bool)
        for index, env in enumerate(self._envs):
            if env.has_wrapper_attr("action_masks") and not self._ended[index]:
                op[index] = torch.from_numpy(np.asarray(env.get_wrapper_attr("action_masks")(), dtype=bool))
        no_slot_features = torch.zeros(self.envs, 1, 0)
        masks = Masks(op, torch.zeros(*op.shape, 1, dtype=torch.bool), {})
        exists = torch.ones(self.envs, 1, dtype=torch.bool)
        return PolicyInputs(base, no_slot_features, torch.zeros(self.envs, 1, dtype=torch.int64), exists, masks)


def _import_modules(name: str) -> None:
    """Import the modules of an environment: the one that registers it and the one of its class."""
    module, _, registered = name.rpartition(":")
    if module:
        import_user_module(module, f"environment.name={name}")
    spec = gymnasium.registry.get(registered)
    if spec is not None and isinstance(spec.entry_point, str):
        import_user_module(spec.entry_point.partition(":")[0], f"environment.name={name}")


if NAME not in gymnasium.registry:
    gymnasium.register(NAME, entry_point="esper.gym:GrowthEnv")
