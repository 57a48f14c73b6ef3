"""Gymnasium: a growing host as a gymnasium environment, and gymnasium environments for the collector.

`GrowthEnv` is one growing host, `gymnasium.make("esper/Growth-v0")`; importing this module registers it.
`GymnasiumVectorEnv` runs any gymnasium environment with discrete actions in the collector.

The actions of `GrowthEnv` are flat, because masks over several discrete factors cannot express which pairs are legal;
`action_masks()` returns the legal ones, in the form that MaskablePPO of sb3-contrib expects.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FlattenObservation

from esper.config import build_environment, build_padded_space, check_config, compose_config
from esper.controllers import OBSERVATION_BOUND, AgentInterface, flat_actions, flat_mask
from esper.evaluation.task_report import compose_tasks
from esper.lifecycle import Layout, Masks
from esper.observation import Observation, PolicyInputs
from esper.plugins import import_user_module
from esper.rng import derive_seed

__all__ = ["NAME", "GrowthEnv", "GymnasiumStep", "GymnasiumVectorEnv", "flat_actions", "flat_mask"]

NAME = "esper/Growth-v0"
ONE_EPISODE = ("environment.envs=1", "environment.workers=0", "environment.threads=1")
EPISODE_PURPOSE = "gym"  # of episode seeds; no run and no evaluation has them


class GrowthEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """A single host that grows; each episode has a task of the distribution.

    An observation has these arrays; sizes are those of the distribution, whatever the split:

    | key        | shape                        | content                                                           |
    |------------|------------------------------|-------------------------------------------------------------------|
    | host       | [host features]              | features of the host                                              |
    | slots      | [slots, slot features]       | features of each slot; 0 where the host lacks the slot            |
    | exists     | [slots]                      | 1 where the host has the slot                                     |
    | blueprints | [slots]                      | the seed of each slot: 0 for none, else 1 + the blueprint's number |
    | candidates | [slots, blueprints, columns] | what each blueprint would be like in each slot                    |

    Arguments:
        tasks: name of a task distribution, such as cifar_zoo; None is the host and data of `overrides`
        split: tasks that episodes draw: train, validation, test or heldout; None is train
        seed: random seed of episodes before a reset that names one; None draws it
        overrides: overrides of the configuration of `esper.evaluate`, such as `data=synthetic_images`
    """

    def __init__(
        self,
        *,
        tasks: str | None = None,
        split: str | None = None,
        seed: int | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        if tasks is None:
            if split is not None:
                raise ValueError(f"split={split}: must be None without tasks, the name of a task distribution.")
            config = compose_config("evaluate", [*overrides, *ONE_EPISODE])
            check_config(config)
        else:
            config = compose_tasks(tasks, split or "train", None, [*overrides, *ONE_EPISODE])
        self.environment = build_environment(config)
        self.interface = AgentInterface(self.environment, build_padded_space(config))
        self.action_names = self.interface.action_names
        self.columns = self.interface.columns
        self.action_space = Discrete(len(self.action_names))
        self.observation_space = self._observation_space()
        self._rng_seed, self._episode_seed, self._episodes = seed, 0, 0
        self._masks: Masks | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start the first episode of a seed, or the next one; families of tasks take turns in successive episodes."""
        super().reset(seed=seed)
        if seed is not None:
            self._rng_seed, self._episodes = seed, 0
        elif self._rng_seed is None:
            self._rng_seed = int(self.np_random.integers(2**62))
        self._episode_seed = self.environment.episode_seed(EPISODE_PURPOSE, self._rng_seed, self._episodes)
        self._episodes += 1
        return self._describe(self.environment.reset([self._episode_seed]))

    def step(self, action: np.int64) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Take an action. An illegal one counts as WAIT, the first action; `info["legal"]` is then false."""
        is_legal = bool(self.action_masks()[action])
        step = self.environment.step(self.interface.action(int(action) if is_legal else 0).unsqueeze(0))
        observation, info = self._describe(step.observation)
        info["legal"] = is_legal
        return observation, step.reward.item(), bool(step.terminated), bool(step.truncated), info

    def action_masks(self) -> np.ndarray:
        """Which actions are legal now: bool [actions]."""
        if self._masks is None:
            raise RuntimeError("call reset first.")
        return self.interface.mask(self._masks)

    def close(self) -> None:
        self.environment.close()

    def _observation_space(self) -> spaces.Dict:
        shapes, blueprints = self.interface.shapes, len(self.interface.space.blueprints)
        features = {name: Box(-OBSERVATION_BOUND, OBSERVATION_BOUND, shapes[name], np.float32) for name in self.columns}
        slots = shapes["exists"][0]
        return spaces.Dict(
            {
                **features,
                "exists": spaces.MultiBinary(slots),
                "blueprints": spaces.MultiDiscrete([blueprints + 1] * slots),
            }
        )

    def _describe(self, observation: Observation) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The observation and the info of a state."""
        self._masks = observation.masks
        return self.interface.observe(observation), self.interface.describe(observation, self._episode_seed)


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
            self._envs = [_make_flat(name, steps) for _ in range(envs)]
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
        columns = tuple(f"feature[{index}]" for index in self._features)
        self.layout = Layout(columns, (), (), (name,), (), {"op": options}, {"op": options})
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
        return PolicyInputs(
            base=base,
            slots=torch.zeros(self.envs, 1, 0),
            blueprints=torch.zeros(self.envs, 1, dtype=torch.int64),
            exists=torch.ones(self.envs, 1, dtype=torch.bool),
            candidates=torch.zeros(self.envs, 1, 0, 0),
            masks=Masks(op, torch.zeros(*op.shape, 1, dtype=torch.bool), {}),
        )


def _make_flat(name: str, steps: int | None) -> gymnasium.Env[Any, Any]:
    """An environment; if its observations are dictionaries, with the values of each in one array."""
    env: gymnasium.Env[Any, Any] = gymnasium.make(name, max_episode_steps=steps)
    return FlattenObservation(env) if isinstance(env.observation_space, spaces.Dict) else env


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
