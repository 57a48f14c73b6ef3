"""Small worlds for the learner: masked, with heads that depend on each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer

from esper.config import load_preset
from esper.lifecycle import Layout, Masks
from esper.observation import PolicyInputs
from esper.ppo import PPO, Collector, PPOSettings, Rollout
from esper.rng import derive_seed
from tests.controllers.fixtures_policies import policy
from tests.lifecycle.fixtures_slots import space


@dataclass(frozen=True)
class StepResult:
    observation: PolicyInputs
    reward: torch.Tensor
    terminated: torch.Tensor
    truncated: torch.Tensor


class Locks:
    """Each step shows a number: germinating that blueprint in the slot of that number pays 1, anything else nothing.

    WAIT is legal always, GERMINATE in two slots of three, one of them the right one. Episodes end by themselves, the
    second environment's a step early.
    """

    def __init__(self, envs: int = 4, steps: int = 5, actions: str = "core", end: str = "terminate") -> None:
        self.name, self.envs, self.steps, self._length, self._end = "locks", envs, steps, steps, end
        self.layout = Layout.from_space(space(actions, 3), 4, 2)

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        return derive_seed(purpose, run_seed, index)

    def reset(self, seeds: Sequence[int]) -> PolicyInputs:
        draws = [torch.Generator().manual_seed(seed % 2**31) for seed in seeds]
        self._keys = torch.stack([torch.randint(0, 3, (self.steps + 1,), generator=each) for each in draws])
        self._wrong = torch.stack([torch.randint(1, 3, (self.steps + 1,), generator=each) for each in draws])
        self._step, self._total = 0, torch.zeros(self.envs)
        return self._inputs()

    def step(self, action: torch.Tensor) -> StepResult:
        key = self._keys[:, self._step]
        op = self.layout.ops.index("GERMINATE")
        right = (action[:, 0] == op) & (action[:, 1] == key) & (action[:, 2] == key)
        self._step += 1
        ended = torch.tensor([self._step >= self._length - (env == 1) for env in range(self.envs)])
        already = torch.tensor([self._step > self._length - (env == 1) for env in range(self.envs)])
        reward = torch.where(already, 0.0, right.float())
        self._total += reward
        ends = ended & ~already
        return StepResult(self._inputs(), reward, ends & (self._end == "terminate"), ends & (self._end == "truncate"))

    def outcome(self) -> dict[str, torch.Tensor]:
        return {"score": self._total}

    def effort(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass

    def _inputs(self) -> PolicyInputs:
        key, wrong = self._keys[:, self._step], (self._keys + self._wrong)[:, self._step] % 3
        ops, every = len(self.layout.ops), torch.arange(self.envs)
        slot = torch.zeros(self.envs, ops, 3, dtype=torch.bool)
        germinate = self.layout.ops.index("GERMINATE")
        slot[every, germinate, key] = slot[every, germinate, wrong] = True
        op = slot.any(-1)
        op[:, 0] = True
        others = {
            head: torch.ones(self.envs, len(options), dtype=torch.bool)
            for head, options in self.layout.options.items()
            if head not in ("op", "slot")
        }
        base = torch.cat([torch.nn.functional.one_hot(key, 3).float(), torch.ones(self.envs, 1)], -1)
        return PolicyInputs(
            base, torch.zeros(self.envs, 3, 2), torch.zeros(self.envs, 3).long(), Masks(op, slot, others)
        )


def settings(**changes: Any) -> PPOSettings:
    made: PPOSettings = load_preset("ppo/default", **{"gamma": 0.9, **changes})
    return made


def learner(world: Any, seed: int = 0, net: dict[str, Any] | None = None, **changes: Any) -> PPO:
    return PPO(policy(world.layout, seed, **(net or {})), settings(**changes), seed)


def trainer(rounds: int = 1, **changes: Any) -> Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    common = {"accelerator": "cpu", "num_sanity_val_steps": 0, "inference_mode": False, "limit_val_batches": 0}
    return Trainer(max_epochs=rounds, **{"logger": False, **quiet, **common, **changes})


def fit(module: PPO, world: Any, rounds: int = 1, warmup: int = 0, **changes: Any) -> Collector:
    collector = Collector(world, run_seed=module.run_seed, warmup=warmup)
    trainer(rounds, **changes).fit(module, datamodule=collector)
    return collector


def played(module: PPO, world: Any, kind: str = "training", seeds: Sequence[int] | None = None) -> Rollout:
    """One rollout without an update."""
    collector = Collector(world, run_seed=0, warmup=0)
    collector.trainer = trainer()
    collector.trainer.strategy.connect(module)
    return collector.run_episodes(kind, list(seeds or range(world.envs)))
