"""A small environment with masks and dependent heads, and helpers that train on it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from esper.config import load_preset
from esper.lifecycle import Layout, Masks
from esper.observation import PolicyInputs
from esper.ppo import (
    PPO,
    AtomicCheckpointIO,
    Collector,
    PPOSettings,
    Rollout,
    RoundListener,
    read_checkpoint,
    task_features,
)
from esper.rng import derive_seed
from tests.controllers.fixtures_policies import policy
from tests.lifecycle.fixtures_slots import space


@dataclass(frozen=True)
class MatchingResult:
    """The result of a step of MatchingEnv."""

    observation: PolicyInputs
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor


class MatchingEnv:
    """Each step shows a key: GERMINATE of that blueprint in the slot of that number has reward 1, anything else 0.

    WAIT is always legal, GERMINATE in two of three slots, one of them the right one, and in both if the slot may be all
    of them. Episodes have `steps` steps, those of the second environment one less.
    """

    def __init__(self, envs: int = 4, steps: int = 5, actions: str = "core", end: str = "terminate") -> None:
        self.name, self.envs, self.steps, self._length, self._end = "matching", envs, steps, steps, end
        self.layout = Layout.from_space(
            space(actions, 3),
            base=dict.fromkeys(("key=0", "key=1", "key=2", "one")),
            slot=dict.fromkeys(("number", "zero")),
            candidate=("number",),
        )

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        return derive_seed(purpose, run_seed, index)

    def reset(self, episode_seeds: Sequence[int]) -> PolicyInputs:
        generators = [torch.Generator().manual_seed(seed % 2**31) for seed in episode_seeds]
        self._keys = torch.stack([torch.randint(0, 3, (self.steps + 1,), generator=each) for each in generators])
        self._offsets = torch.stack([torch.randint(1, 3, (self.steps + 1,), generator=each) for each in generators])
        self._step, self._total = 0, torch.zeros(self.envs)
        return self._inputs()

    def step(self, action: torch.Tensor) -> MatchingResult:
        key = self._keys[:, self._step]
        op = self.layout.ops.index("GERMINATE")
        is_right = (action[:, 0] == op) & (action[:, 1] == key) & (action[:, 2] == key)
        self._step += 1
        is_over = torch.tensor([self._step >= self._length - (env == 1) for env in range(self.envs)])
        was_over = torch.tensor([self._step > self._length - (env == 1) for env in range(self.envs)])
        reward = torch.where(was_over, 0.0, is_right.float())
        self._total += reward
        ends = is_over & ~was_over
        terminated, truncated = ends & (self._end == "terminate"), ends & (self._end == "truncate")
        return MatchingResult(self._inputs(), reward, terminated, truncated)

    def outcome(self) -> dict[str, torch.Tensor]:
        return {"score": self._total}

    def effort(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass

    def _inputs(self) -> PolicyInputs:
        key, other = self._keys[:, self._step], (self._keys + self._offsets)[:, self._step] % 3
        ops, rows = len(self.layout.ops), torch.arange(self.envs)
        slot = torch.zeros(self.envs, ops, 3 + self.layout.all_slots, dtype=torch.bool)
        germinate = self.layout.ops.index("GERMINATE")
        slot[:, germinate, 3:] = True
        slot[rows, germinate, key] = slot[rows, germinate, other] = True
        op = slot.any(-1)
        op[:, 0] = True
        others = {
            head: torch.ones(self.envs, len(options), dtype=torch.bool)
            for head, options in self.layout.options.items()
            if head not in ("op", "slot")
        }
        base = torch.cat([torch.nn.functional.one_hot(key, 3).float(), torch.ones(self.envs, 1)], -1)
        number = torch.arange(3.0) - 1  # of each slot, and of each blueprint
        return PolicyInputs(
            base=base,
            slots=torch.stack([number, torch.zeros(3)], -1).expand(self.envs, -1, -1),
            blueprints=torch.zeros(self.envs, 3).long(),
            exists=torch.ones(self.envs, 3, dtype=torch.bool),
            candidates=number[:, None].expand(self.envs, 3, -1, -1),
            masks=Masks(op, slot, others),
        )


class ForcedEnv(MatchingEnv):
    """In every second step only WAIT is legal."""

    def _inputs(self) -> PolicyInputs:
        inputs = super()._inputs()
        if self._step % 2:
            inputs.masks.op[:, 1:] = False
            inputs.masks.slot[:] = False
        return inputs


class TaskEnv(MatchingEnv):
    """Episode seeds 0 and 1 are of task 7, 2 and 3 of task 90, and so on; each task has its own constant reward."""

    task_features = ("level", "nothing")

    def task_number(self, episode_seed: int) -> int:
        return 7 + 83 * (episode_seed // 2 % 8)

    def describe_tasks(self, episode_seeds: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[float(self.task_number(each)), 0.0] for each in episode_seeds])

    def reset(self, episode_seeds: Sequence[int]) -> PolicyInputs:
        self._levels = self.describe_tasks(episode_seeds)[:, 0]
        return super().reset(episode_seeds)

    def step(self, action: torch.Tensor) -> MatchingResult:
        result = super().step(action)
        return replace(result, reward=result.reward + self._levels * (result.terminated | result.truncated))


class RoundStepsEnv(MatchingEnv):
    """Training rounds have 3, 5 or 8 steps."""

    round_steps = (3, 5, 8)

    def reset(self, episode_seeds: Sequence[int], *, steps: int = 5) -> PolicyInputs:
        self._length = steps
        configured, self.steps = self.steps, steps
        try:
            return super().reset(episode_seeds)
        finally:
            self.steps = configured


def make_settings(**changes: Any) -> PPOSettings:
    settings: PPOSettings = load_preset("ppo/default", **{"gamma": 0.9, **changes})
    return settings


def make_module(env: Any, run_seed: int = 0, network: dict[str, Any] | None = None, **changes: Any) -> PPO:
    """PPO with a small policy; `network` are arguments of the policy, `changes` are settings of PPO."""
    return PPO(policy(env.layout, run_seed, **(network or {})), make_settings(**changes), run_seed, task_features(env))


def make_trainer(rounds: int = 1, **changes: Any) -> Trainer:
    is_saved = any(isinstance(callback, ModelCheckpoint) for callback in changes.get("callbacks", []))
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = is_saved
    common = {"accelerator": "cpu", "num_sanity_val_steps": 0, "inference_mode": False, "limit_val_batches": 0}
    return Trainer(max_epochs=rounds, **{"logger": False, **quiet, **common, **changes})


def make_collector(module: PPO, env: Any, warmup: int = 0, listeners: Sequence[RoundListener] = ()) -> Collector:
    return Collector(env, module.policy, module.counters, run_seed=module.run_seed, warmup=warmup, listeners=listeners)


def fit(module: PPO, env: Any, rounds: int = 1, warmup: int = 0, **changes: Any) -> Collector:
    collector = make_collector(module, env, warmup)
    make_trainer(rounds, **changes).fit(module, datamodule=collector)
    return collector


def run_round(module: PPO, env: Any, kind: str = "training", episode_seeds: Sequence[int] | None = None) -> Rollout:
    """One rollout without an update."""
    return make_collector(module, env).run_episodes(kind, list(episode_seeds or range(env.envs)))


def restore(module: PPO, path: Path, env: Any = None) -> None:
    """Load a checkpoint as a resumed run does that has no round left."""
    env = env or MatchingEnv()
    trainer = make_trainer(read_checkpoint(path).metadata.counters.rounds, plugins=[AtomicCheckpointIO()])
    trainer.fit(module, datamodule=make_collector(module, env), ckpt_path=path, weights_only=True)
