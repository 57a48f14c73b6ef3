"""Rounds of episodes as a LightningDataModule: each epoch of the trainer plays one round with the policy as it is."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from esper.controllers import PolicyController
from esper.lifecycle import Layout
from esper.observation import PolicyInputs
from esper.ppo.distributed import reduce_sum, world_size
from esper.ppo.module import PPO
from esper.ppo.rollout import Rollout


class StepResult(Protocol):
    """What comes of a decision: the observation after it, and [envs] each of reward, terminated and truncated."""

    @property
    def observation(self) -> PolicyInputs: ...

    @property
    def reward(self) -> Tensor: ...

    @property
    def terminated(self) -> Tensor: ...

    @property
    def truncated(self) -> Tensor: ...


class VectorEnv(Protocol):
    """N episodes side by side, of at most `steps` steps; those that are over keep their last observation."""

    layout: Layout
    name: str
    envs: int
    steps: int

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int: ...

    def reset(self, episode_seeds: Sequence[int]) -> PolicyInputs: ...

    def step(self, action: Tensor) -> StepResult: ...

    def outcome(self) -> dict[str, Tensor]: ...

    def effort(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class RoundListener(Protocol):
    """Is told of every round as it is played; must not change anything."""

    def on_round_start(self, kind: str, episode_seeds: Sequence[int], steps: int) -> None: ...

    def on_step(self, action: Tensor, step: StepResult) -> None: ...

    def on_round_end(self, rollout: Rollout) -> None: ...


class StoppedError(Exception):
    """Someone asked the run to stop; no round is half done by it."""


class RoundLoader:
    """A dataloader with a length, without which Lightning would fetch ahead: a round of a policy not yet updated."""

    def __init__(self, plays: Sequence[Callable[[], Rollout]]) -> None:
        self._plays = plays

    def __len__(self) -> int:
        return len(self._plays)

    def __iter__(self) -> Iterator[Rollout]:
        for play in self._plays:
            yield play()


class Collector(LightningDataModule):
    """Plays episodes with the policy of the module that is being trained.

    Training episode k of a run has the same seed whatever the number of environments or ranks. Validation episodes are
    the same each time, and no training episode ever has their seeds.

    Arguments:
        environment: what is played
        run_seed: that all episode seeds follow from
        warmup: steps played before the first round, for the first statistics of observations
        budget: decisions of the whole run; it ends before a round that might pass them. None is no limit
        watchers: told of every round
    """

    def __init__(
        self,
        environment: VectorEnv,
        *,
        run_seed: int,
        warmup: int,
        budget: int | None = None,
        listeners: Sequence[RoundListener] = (),
    ) -> None:
        super().__init__()
        if warmup < 0:
            raise ValueError(f"collector.warmup={warmup}: must be at least 0.")
        self.environment, self.listeners = environment, list(listeners)
        self.stop_reason: str | None = None  # why the run should stop, said by whoever wants it to
        self._run_seed, self._warmup, self._budget = run_seed, warmup, budget
        self._most = environment.envs * environment.steps  # decisions of a round
        if budget is not None and budget < self._most:
            raise ValueError(f"decisions={budget}: must be at least the {self._most:,} that a round may take.")

    def train_dataloader(self) -> RoundLoader:
        return RoundLoader([self._training_round])

    def val_dataloader(self) -> RoundLoader:
        held_out = self._episode_seeds("validation", self._first)
        return RoundLoader(
            [lambda: self.run_episodes("sampled", held_out), lambda: self.run_episodes("greedy", held_out)]
        )

    def transfer_batch_to_device(self, batch: Rollout, device: torch.device, dataloader_idx: int) -> Rollout:
        return batch.to(device)

    def run_episodes(self, kind: str, episode_seeds: Sequence[int]) -> Rollout:
        """Whole episodes of the given seeds; `greedy` without chance."""
        module, world = self._module, self.environment
        if module.policy.layout != world.layout:
            raise ValueError("policy: was built for other slots, heads or features than the environment has.")
        controller = PolicyController(module.policy, greedy=kind == "greedy")
        for listener in self.listeners:
            listener.on_round_start(kind, episode_seeds, world.steps)
        clock = {"environment": 0.0, "policy": 0.0}
        began = time.perf_counter()
        observation, memory = world.reset(episode_seeds), controller.begin(episode_seeds)
        clock["environment"] += time.perf_counter() - began
        rollout = Rollout.empty(list(episode_seeds), world.steps, world.layout, module.policy.begin(len(episode_seeds)))
        rollout.kind = kind
        alive = torch.ones(len(episode_seeds), dtype=torch.bool)
        for step in range(world.steps):
            if kind == "training":
                self._pause()
            began = time.perf_counter()
            choice, memory = controller.decide(observation, memory)
            if step:
                rollout.next_value[:, step - 1] = choice.value
            rollout.write(step, choice, alive)
            action = choice.action.cpu()
            decided = time.perf_counter()
            paid = world.step(action)
            clock["policy"] += decided - began
            clock["environment"] += time.perf_counter() - decided
            for listener in self.listeners:
                listener.on_step(action, paid)
            observation = paid.observation
            cut = paid.truncated if step + 1 < world.steps else ~paid.terminated
            rollout.pay(step, paid.reward, paid.terminated, cut)
            alive = alive & ~(paid.terminated | cut)
            if not alive.any():
                break
        choice, _ = controller.decide(observation, memory)
        rollout.next_value[:, step] = choice.value
        effort = world.effort()
        rollout.samples = effort.pop("samples", 0.0)
        rollout.outcome, rollout.seconds = world.outcome(), {**clock, **effort}
        for listener in self.listeners:
            listener.on_round_end(rollout)
        return rollout

    def budget_exhausted(self, decisions: int) -> bool:
        """Whether another round might pass the budget."""
        return self._budget is not None and decisions + self._most * world_size() > self._budget

    def _training_round(self) -> Rollout:
        self._pause_together()
        module = self._module
        if self._warmup and not module.policy.base_statistics.count:
            self._warm_up()
        return self.run_episodes("training", self._episode_seeds("training", module.counters.episodes + self._first))

    def _warm_up(self) -> None:
        """Fold what the untrained policy sees into the observation statistics."""
        module, world = self._module, self.environment
        episode_seeds = self._episode_seeds("warm-up", self._first)
        controller, policy = PolicyController(module.policy, greedy=False), module.policy
        observation, memory = world.reset(episode_seeds), controller.begin(episode_seeds)
        device, alive = memory.state[0].device, torch.ones(len(episode_seeds), dtype=torch.bool)
        total = torch.zeros((), device=device)
        for _ in range(min(self._warmup, world.steps)):
            self._pause()
            choice, memory = controller.decide(observation, memory)
            seen, those = choice.inputs, alive.to(device).unsqueeze(1)
            total = total + policy.moments(seen.base.unsqueeze(1), seen.slots.unsqueeze(1), those)
            paid = world.step(choice.action.cpu())
            observation = paid.observation
            alive = alive & ~(paid.terminated | paid.truncated)
            if not alive.any():
                break
        policy.fold(reduce_sum(total))

    def _episode_seeds(self, purpose: str, start: int) -> list[int]:
        return [
            self.environment.episode_seed(purpose, self._run_seed, start + index)
            for index in range(self.environment.envs)
        ]

    def _pause(self) -> None:
        """Where a run may be stopped: nothing is half learned. One rank alone must not leave the others waiting."""
        if self.stop_reason is not None and world_size() == 1:
            raise StoppedError(self.stop_reason)

    def _pause_together(self) -> None:
        """Where several ranks may be stopped, all or none."""
        asked = reduce_sum(torch.tensor(float(self.stop_reason is not None), device=self._module.device))
        if asked:
            raise StoppedError(self.stop_reason or "another rank")

    @property
    def _first(self) -> int:
        """Index of this rank's first episode among those of all ranks."""
        assert self.trainer is not None
        return self.trainer.global_rank * self.environment.envs

    @property
    def _module(self) -> PPO:
        assert self.trainer is not None
        module = self.trainer.lightning_module
        assert isinstance(module, PPO)
        return module
