"""Rounds as a LightningDataModule: each Lightning epoch runs one round with the current policy."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from esper.controllers import Policy, PolicyController
from esper.lifecycle import Layout
from esper.observation import PolicyInputs
from esper.ppo.distributed import reduce_sum, world_size
from esper.ppo.metadata import Counters
from esper.ppo.rollout import Rollout
from esper.rng import make_generator


class StepResult(Protocol):
    """The result of one step: the next observation, and reward, terminated and truncated, [envs] each."""

    @property
    def observation(self) -> PolicyInputs: ...

    @property
    def reward(self) -> Tensor: ...

    @property
    def terminated(self) -> Tensor: ...

    @property
    def truncated(self) -> Tensor: ...


class VectorEnv(Protocol):
    """N episodes that run in parallel, each of at most `steps` steps.

    An episode that has ended keeps its last observation. `outcome` has the final results [envs] of the episodes by
    name; `effort` has seconds by phase, and `samples`, the training samples of the hosts.

    An environment with several tasks may also have:

    - `task_number(episode_seed) -> int`: the same number for episodes of the same task;
    - `task_features: tuple[str, ...]`: names of descriptors of a task, may be empty;
    - `describe_tasks(episode_seeds) -> Tensor`: these descriptors, [episodes, task features]. A separate critic gets
      them, the policy does not, so they may be things that a policy has to find out.

    An environment whose training rounds differ in length has `round_steps: tuple[int, ...]`, the numbers of steps that
    rounds have in turn, and `reset` has the keyword argument `steps`.
    """

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
    """Receives every step of every round; must not change anything."""

    def on_round_start(self, kind: str, episode_seeds: Sequence[int], steps: int) -> None: ...

    def on_step(self, action: Tensor, step: StepResult) -> None: ...

    def on_round_end(self, rollout: Rollout) -> None: ...


class StoppedError(Exception):
    """The run was requested to stop; raised between two steps or two rounds, before an update."""


class RoundLoader:
    """A dataloader of rounds, each run when it is fetched.

    It has a length, so that Lightning does not prefetch: `PPO` refuses a round of the policy before its update.
    """

    def __init__(self, rounds: Sequence[Callable[[], Rollout]]) -> None:
        self._rounds = rounds

    def __len__(self) -> int:
        return len(self._rounds)

    def __iter__(self) -> Iterator[Rollout]:
        for run_round in self._rounds:
            yield run_round()


class Collector(LightningDataModule):
    """Runs episodes with a policy that is being trained.

    Training episode k of a run has the same episode seed whatever the number of environments or ranks. Validation uses
    the same episode seeds each time, which training never uses.

    Arguments:
        environment: the episodes that run in parallel
        policy: the policy that acts
        counters: progress of the run; whoever trains the policy updates them
        run_seed: all episode seeds are derived from it
        warmup: steps before the first round, for the first statistics of observations
        listeners: receive every step of every round
    """

    def __init__(
        self,
        environment: VectorEnv,
        policy: Policy,
        counters: Counters,
        *,
        run_seed: int,
        warmup: int,
        listeners: Sequence[RoundListener] = (),
    ) -> None:
        super().__init__()
        if warmup < 0:
            raise ValueError(f"collector.warmup={warmup}: must be at least 0.")
        if policy.layout != environment.layout:
            raise ValueError("policy: its slots, heads and features must be those of the environment.")
        self.environment, self.listeners = environment, list(listeners)
        self.stop_reason: str | None = None  # set it to stop the run
        self._policy, self._counters, self._run_seed, self._warmup = policy, counters, run_seed, warmup

    def train_dataloader(self) -> RoundLoader:
        return RoundLoader([self._run_training_round])

    def val_dataloader(self) -> RoundLoader:
        episode_seeds = self._episode_seeds("validation", self._first_episode)
        return RoundLoader(
            [lambda: self.run_episodes("sampled", episode_seeds), lambda: self.run_episodes("greedy", episode_seeds)]
        )

    def transfer_batch_to_device(self, batch: Rollout, device: torch.device, dataloader_idx: int) -> Rollout:
        return batch.to(device)

    def run_episodes(self, kind: str, episode_seeds: Sequence[int]) -> Rollout:
        """Run one whole episode per seed; `kind` is training, sampled or greedy (the most likely actions)."""
        env, policy = self.environment, self._policy
        steps = self._draw_steps() if kind == "training" else env.steps
        options = {} if steps == env.steps else {"steps": steps}
        controller = PolicyController(policy, greedy=kind == "greedy", explore=kind == "training")
        for listener in self.listeners:
            listener.on_round_start(kind, episode_seeds, steps)
        seconds = {"environment": 0.0, "policy": 0.0}
        started = time.perf_counter()
        observation, memory = env.reset(episode_seeds, **options), controller.begin(episode_seeds)
        seconds["environment"] += time.perf_counter() - started
        rollout = Rollout.empty(list(episode_seeds), steps, env.layout, policy.begin(len(episode_seeds)))
        rollout.kind, rollout.rounds_done = kind, self._counters.rounds
        rollout.tasks.copy_(torch.tensor(_task_numbers(env, episode_seeds)))
        if task_features(env):
            rollout.task_features = env.describe_tasks(episode_seeds).float().to(rollout.tasks.device)  # type: ignore[attr-defined]
        alive = torch.ones(len(episode_seeds), dtype=torch.bool)
        for step in range(steps):
            if kind == "training":
                self._check_stop()
            started = time.perf_counter()
            decision, memory = controller.decide(observation, memory)
            if step:
                rollout.next_value[:, step - 1] = decision.value
            rollout.write_decision(step, decision, alive)
            action = decision.action.cpu()
            env_started = time.perf_counter()
            result = env.step(action)
            seconds["policy"] += env_started - started
            seconds["environment"] += time.perf_counter() - env_started
            for listener in self.listeners:
                listener.on_step(action, result)
            observation = result.observation
            truncated = result.truncated if step + 1 < steps else ~result.terminated
            rollout.write_result(step, result.reward, result.terminated, truncated)
            alive = alive & ~(result.terminated | truncated)
            if not alive.any():
                break
        decision, _ = controller.decide(observation, memory)
        rollout.next_value[:, step] = decision.value
        rollout.write_final(decision)
        effort = env.effort()
        rollout.samples = effort.pop("samples", 0.0)
        rollout.outcome, rollout.seconds = env.outcome(), {**seconds, **effort}
        for listener in self.listeners:
            listener.on_round_end(rollout)
        return rollout

    def _run_training_round(self) -> Rollout:
        self._check_stop_on_all_ranks()
        if self._warmup and not self._policy.base_statistics.count:
            self._warm_up()
        start = self._counters.episodes + self._first_episode
        return self.run_episodes("training", self._episode_seeds("training", start))

    def _warm_up(self) -> None:
        """Add the observations of the untrained policy to the observation statistics."""
        env, policy = self.environment, self._policy
        episode_seeds = self._episode_seeds("warm-up", self._first_episode)
        controller = PolicyController(policy, greedy=False, explore=True)
        observation, memory = env.reset(episode_seeds), controller.begin(episode_seeds)
        device, alive = memory.state[0].device, torch.ones(len(episode_seeds), dtype=torch.bool)
        total = torch.zeros((), device=device)
        for _ in range(min(self._warmup, env.steps)):
            self._check_stop()
            decision, memory = controller.decide(observation, memory)
            inputs, valid = decision.inputs, alive.to(device).unsqueeze(1)
            features = (inputs.base.unsqueeze(1), inputs.slots.unsqueeze(1))
            total = total + policy.moments(*features, valid, inputs.exists)
            result = env.step(decision.action.cpu())
            observation = result.observation
            alive = alive & ~(result.terminated | result.truncated)
            if not alive.any():
                break
        policy.fold(reduce_sum(total))

    def _draw_steps(self) -> int:
        """The steps of the next training round: each number comes once in every block of as many rounds."""
        numbers = round_steps(self.environment)
        if len(numbers) == 1:
            return numbers[0]
        block, place = divmod(self._counters.rounds, len(numbers))
        order = torch.randperm(len(numbers), generator=make_generator("round steps", self._run_seed, block))
        return numbers[int(order[place])]

    def _episode_seeds(self, purpose: str, start: int) -> list[int]:
        return [
            self.environment.episode_seed(purpose, self._run_seed, start + index)
            for index in range(self.environment.envs)
        ]

    def _check_stop(self) -> None:
        """Stop here if requested, but not with several ranks: the others would wait for this one."""
        if self.stop_reason is not None and world_size() == 1:
            raise StoppedError(self.stop_reason)

    def _check_stop_on_all_ranks(self) -> None:
        """Stop all ranks here if a stop was requested on any of them."""
        device = self._policy.base_statistics.count.device
        requests = reduce_sum(torch.tensor(float(self.stop_reason is not None), device=device))
        if requests:
            raise StoppedError(self.stop_reason or "another rank")

    @property
    def _first_episode(self) -> int:
        """Index of this rank's first episode in a round of all ranks."""
        assert self.trainer is not None
        return self.trainer.global_rank * self.environment.envs


def task_features(environment: VectorEnv) -> tuple[str, ...]:
    """Names of the descriptors of a task; empty for environments without any."""
    return tuple(getattr(environment, "task_features", ()))


def round_steps(environment: VectorEnv) -> tuple[int, ...]:
    """The numbers of steps that training rounds have in turn."""
    return tuple(getattr(environment, "round_steps", (environment.steps,)))


def _task_numbers(environment: VectorEnv, episode_seeds: Sequence[int]) -> list[int]:
    """The number of each episode's task; 0 if the environment has only one."""
    task_number = getattr(environment, "task_number", None)
    return [0 if task_number is None else task_number(episode_seed) for episode_seed in episode_seeds]
