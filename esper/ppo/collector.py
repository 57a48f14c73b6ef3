"""Rounds of episodes as a LightningDataModule: each epoch of the trainer plays one round with the policy as it is."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from esper.controllers import Learned
from esper.environment import Inputs
from esper.lifecycle import Layout
from esper.ppo.agree import ranks, summed
from esper.ppo.module import PPO
from esper.ppo.rollout import Rollout


class Paid(Protocol):
    """What comes of a decision: the observation after it, and [envs] each of reward, terminated and truncated."""

    @property
    def observation(self) -> Inputs: ...

    @property
    def reward(self) -> Tensor: ...

    @property
    def terminated(self) -> Tensor: ...

    @property
    def truncated(self) -> Tensor: ...


class World(Protocol):
    """N episodes side by side, of at most `steps` steps; those that are over keep their last observation."""

    layout: Layout
    name: str
    envs: int
    steps: int

    def seed(self, purpose: str, seed: int, index: int) -> int: ...

    def reset(self, seeds: Sequence[int]) -> Inputs: ...

    def step(self, action: Tensor) -> Paid: ...

    def outcome(self) -> dict[str, Tensor]: ...

    def effort(self) -> dict[str, float]: ...

    def close(self) -> None: ...


class Watcher(Protocol):
    """Is told of every round as it is played; must not change anything."""

    def round_begins(self, kind: str, seeds: Sequence[int], steps: int) -> None: ...

    def step_done(self, action: Tensor, step: Paid) -> None: ...

    def round_ends(self, rollout: Rollout) -> None: ...


class StoppedError(Exception):
    """Someone asked the run to stop; no round is half done by it."""


class Rounds:
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
        seed: of the run
        warmup: steps played before the first round, for the first statistics of observations
        budget: decisions of the whole run; it ends before a round that might pass them. None is no limit
        watchers: told of every round
    """

    def __init__(
        self,
        environment: World,
        *,
        seed: int,
        warmup: int,
        budget: int | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        super().__init__()
        if warmup < 0:
            raise ValueError(f"collector.warmup={warmup}: must be at least 0.")
        self.environment, self.watchers = environment, list(watchers)
        self.stop: str | None = None  # why the run should stop, said by whoever wants it to
        self._seed, self._warmup, self._budget = seed, warmup, budget
        self._most = environment.envs * environment.steps  # decisions of a round
        if budget is not None and budget < self._most:
            raise ValueError(f"decisions={budget}: must be at least the {self._most:,} that a round may take.")

    def train_dataloader(self) -> Rounds:
        return Rounds([self._training_round])

    def val_dataloader(self) -> Rounds:
        held_out = self._seeds("validation", self._first)
        return Rounds([lambda: self.play("sampled", held_out), lambda: self.play("greedy", held_out)])

    def transfer_batch_to_device(self, batch: Rollout, device: torch.device, dataloader_idx: int) -> Rollout:
        return batch.to(device)

    def play(self, kind: str, seeds: Sequence[int]) -> Rollout:
        """Whole episodes of the given seeds; `greedy` without chance."""
        module, world = self._module, self.environment
        if module.policy.layout != world.layout:
            raise ValueError("policy: was built for other slots, heads or features than the environment has.")
        controller = Learned(module.policy, greedy=kind == "greedy")
        for watcher in self.watchers:
            watcher.round_begins(kind, seeds, world.steps)
        clock = {"environment": 0.0, "policy": 0.0}
        began = time.perf_counter()
        observation, memory = world.reset(seeds), controller.begin(seeds)
        clock["environment"] += time.perf_counter() - began
        rollout = Rollout.empty(list(seeds), world.steps, world.layout, module.policy.begin(len(seeds)))
        rollout.kind = kind
        alive = torch.ones(len(seeds), dtype=torch.bool)
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
            for watcher in self.watchers:
                watcher.step_done(action, paid)
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
        for watcher in self.watchers:
            watcher.round_ends(rollout)
        return rollout

    def spent(self, decisions: int) -> bool:
        """Whether another round might pass the budget."""
        return self._budget is not None and decisions + self._most * ranks() > self._budget

    def _training_round(self) -> Rollout:
        self._pause_together()
        module = self._module
        if self._warmup and not module.policy.base_statistics.count:
            self._warm_up()
        return self.play("training", self._seeds("training", module.counters.episodes + self._first))

    def _warm_up(self) -> None:
        """Fold what the untrained policy sees into the observation statistics."""
        module, world = self._module, self.environment
        seeds = self._seeds("warm-up", self._first)
        controller, policy = Learned(module.policy, greedy=False), module.policy
        observation, memory = world.reset(seeds), controller.begin(seeds)
        device, alive = memory.state[0].device, torch.ones(len(seeds), dtype=torch.bool)
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
        policy.fold(summed(total))

    def _seeds(self, purpose: str, start: int) -> list[int]:
        return [self.environment.seed(purpose, self._seed, start + index) for index in range(self.environment.envs)]

    def _pause(self) -> None:
        """Where a run may be stopped: nothing is half learned. One rank alone must not leave the others waiting."""
        if self.stop is not None and ranks() == 1:
            raise StoppedError(self.stop)

    def _pause_together(self) -> None:
        """Where several ranks may be stopped, all or none."""
        asked = summed(torch.tensor(float(self.stop is not None), device=self._module.device))
        if asked:
            raise StoppedError(self.stop or "another rank")

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
