"""The oracle with many tasks: what a task's host lacks has to be inferred from what an episode shows."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from esper.arguments import Count
from esper.blueprints import blueprint
from esper.environment.formula import CHANCE_SCORE, HOST_PARAMETERS, FormulaEnvironment, counted_seeds
from esper.environment.oracle_tasks import (
    HELD_OUT_SLOT_RANGE,
    SLOT_CHANNELS,
    SPLITS,
    TASKS,
    TOPOLOGY,
    OracleTasks,
    draw_tasks,
    train_step,
)
from esper.environment.purposes import TRAINING_PURPOSES
from esper.environment.record import StepRecord
from esper.environment.step import RewardResult
from esper.lifecycle import ActionSpace, Rules, Slots, Stage
from esper.observation import ClockView, Descriptors, HostMeasurements, SlotShape, describe_host
from esper.rng import derive_seed, make_generator

CHANCE_LOSS = math.log(10)  # of ten classes
LOSS_PER_POINT = CHANCE_LOSS / (100 - CHANCE_SCORE)  # a perfect score has loss 0
CONTRIBUTION_NOISE = 0.5  # relative to that of a score: both measurements of a contribution use the same samples


class TaskOracle(FormulaEnvironment):
    """N episodes, each of one task. See `oracle_tasks` for the tasks and for the formula of the score.

    The episode seed determines the task, which is not observed. A seed slows down the training of its host in
    proportion to its cost. The score of an episode is that of the host with its fossils after the last step.

    Arguments:
        space, rules: the action space and the lifecycle rules
        reward: computes the reward of a step
        envs: parallel episodes
        steps: decisions in an episode
        split: tasks of all episodes that do not train: train, validation, test, or heldout, which has other numbers of
            slots and other costs
        repeats: successive episodes of the same task
        noise: factor of the noise of all measurements
        features: what controllers observe: absolute or scale_free
    """

    name = "oracle_tasks"
    rent = 0.0

    def __init__(
        self,
        *,
        space: ActionSpace,
        rules: Rules,
        reward: Callable[[StepRecord], RewardResult],
        envs: Count,
        steps: Count,
        split: Literal["train", "validation", "test", "heldout"],
        repeats: Count,
        noise: float,
        features: Literal["absolute", "scale_free"],
    ) -> None:
        if envs % repeats:
            raise ValueError(f"environment.repeats={repeats}: must divide environment.envs={envs}.")
        most = max(HELD_OUT_SLOT_RANGE)
        if len(space.slots) < most:
            raise ValueError(
                f"slots.names={list(space.slots)}: must be at least {most} slots, because tasks have up to {most}."
            )
        super().__init__(space=space, rules=rules, reward=reward, envs=envs, steps=steps, features=features)
        self._split, self._repeats, self._noise = split, repeats, noise
        self._all = draw_tasks(range(TASKS), len(space.slots), space.blueprints)
        self._described = Descriptors.stack([_describe_task(self._all, number, space) for number in range(TASKS)])

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int:
        """The seed of the episode number `index`.

        Successive groups of `repeats` episodes have the same task. Each task comes once in every block of as many
        groups as there are tasks, in an order that differs from block to block.
        """
        numbers = SPLITS["train" if purpose in TRAINING_PURPOSES else self._split]
        block, position = divmod(index // self._repeats, len(numbers))
        order = torch.randperm(len(numbers), generator=make_generator(f"{purpose} tasks", run_seed, block))
        return self.seed_of_task(numbers[int(order[position])], derive_seed(purpose, run_seed, index))

    def seed_of_task(self, number: int, rng_seed: int) -> int:
        """An episode seed of one task; `rng_seed` determines everything else."""
        return rng_seed // TASKS * TASKS + number

    def task_number(self, episode_seed: int) -> int:
        """The number of an episode's task."""
        return episode_seed % TASKS

    def tasks(self, numbers: Sequence[int]) -> OracleTasks:
        """The tasks of some task numbers."""
        return self._all[torch.tensor(numbers)]

    @property
    def task_features(self) -> tuple[str, ...]:
        """The names of the columns of `describe_tasks`."""
        names = self.space.blueprints
        return (
            "slots", "level", "pace", "delay", "noise", "depth",
            *(f"gain={name}" for name in names), *(f"cost={name}" for name in names),
        )  # fmt: skip

    def describe_tasks(self, episode_seeds: Sequence[int]) -> Tensor:
        """What a critic may know of each episode's task, but no policy: [episodes, task_features], about -1 to 1."""
        numbers = self._task_numbers(episode_seeds)
        tasks = self._all[numbers]
        gain, cost = tasks.gain.sum(1), tasks.cost.sum(1)  # of seeds in all slots
        by_slot = tasks.gain.abs().sum(2)
        depth = (by_slot * self._descriptors(numbers).depth).sum(1) / by_slot.sum(1)  # of the slots with large gains
        slots = tasks.exists.sum(1) / len(self.space.slots)
        columns = [slots, tasks.level / 100, tasks.pace, tasks.delay, tasks.noise, depth]
        return torch.cat([torch.stack(columns, 1), gain / 10, cost.log() / 3], 1)

    def _task_numbers(self, episode_seeds: Sequence[int]) -> Tensor:
        return torch.tensor([self.task_number(episode_seed) for episode_seed in episode_seeds])

    def _start(self, episode_seeds: Sequence[int]) -> Slots:
        envs, slots = len(episode_seeds), len(self.space.slots)
        self._numbers = self._task_numbers(episode_seeds)
        self._tasks = self._all[self._numbers]
        shape = (self.steps + 1, slots + 1)
        draws = [torch.randn(shape, generator=make_generator("oracle", seed)) for seed in episode_seeds]
        noise = self._noise * self._tasks.noise.view(-1, 1, 1) * torch.stack(draws)
        self._score_noise, self._contribution_noise = noise[..., 0], CONTRIBUTION_NOISE * noise[..., 1:]
        self._host_training, self._seed_training = torch.zeros(envs), torch.zeros(envs, slots)
        return Slots.empty(envs, slots, exists=self._tasks.exists)

    def _describe(self, envs: int) -> Descriptors:
        return self._descriptors(self._numbers)

    def _descriptors(self, numbers: Tensor) -> Descriptors:
        """What is observed of the slots and blueprints of some tasks."""
        return Descriptors(**{name: values[numbers] for name, values in vars(self._described).items()})

    def _seed_parameters(self, slots: Slots) -> Tensor:
        return HOST_PARAMETERS * self._seed_costs(slots)

    def _seed_costs(self, slots: Slots) -> Tensor:
        """FLOPs of the current seeds relative to the host: [envs, slots]; 0 without a seed."""
        return self._tasks.of_seeds(self._tasks.cost, torch.where(slots.occupied, slots.blueprint, -1))

    def _train(self, slots: Slots) -> None:
        so_far = torch.where(slots.age > 0, self._seed_training, 0.0)
        trained = train_step(self._host_training, so_far, self._seed_costs(slots), self.steps)
        self._host_training, self._seed_training = trained

    def _measure(self, slots: Slots, step: int, last: bool) -> HostMeasurements:
        tasks = self._tasks
        gain = tasks.of_seeds(tasks.gain, slots.blueprint) * tasks.trained_share(self._seed_training)
        share = torch.where(counted_seeds(slots, last), slots.alpha * gain, 0.0)
        score = tasks.host_score(self._host_training) + share.sum(1) + self._score_noise[:, step]
        contribution = share + self._contribution_noise[:, step]
        return self._measurements(
            slots,
            last,
            score=score,
            loss=LOSS_PER_POINT * (100 - score),
            contribution=contribution,
            loss_contribution=LOSS_PER_POINT * contribution,
        )

    def _first_clock(self, now: HostMeasurements) -> ClockView:
        return self._read_clock(0, self._slots, torch.full_like(self._seed_training, torch.nan), now.loss)

    def _next_clock(self, record: StepRecord) -> ClockView:
        old, after = self._clock, record.after
        start = old.next_start(record.entered[..., Stage.GERMINATED], after.occupied)
        return self._read_clock(record.step + 1, after, start, old.first_loss)

    def _read_clock(self, step: int, slots: Slots, start: Tensor, first_loss: Tensor) -> ClockView:
        spent, cost = torch.full_like(self._host_training, step / self.steps), self._seed_costs(slots)
        self._clock = ClockView(
            spent=spent,
            lr_left=1 - spent,
            passes=1 / self._tasks.pace,
            cost=1 + cost.sum(1),
            seed_cost=cost,
            start=start,
            first_loss=first_loss,
            chance_loss=torch.full_like(spent, CHANCE_LOSS),
            fresh=torch.ones_like(spent, dtype=torch.bool),
        )
        return self._clock


def _describe_task(tasks: OracleTasks, number: int, space: ActionSpace) -> Descriptors:
    """What is observed of the slots and blueprints of one task: slots that differ in depth only."""
    names = space.present_slots(tasks.exists[number])
    part = 1 / (len(names) + 1)  # of the host
    shapes = {name: SlotShape((place + 1) * part, float(SLOT_CHANNELS), 1.0, part) for place, name in enumerate(names)}
    cost = tasks.cost[number, 0].tolist()  # the same in all slots
    relative = {(slot, name): (c, c) for slot in names for name, c in zip(space.blueprints, cost, strict=True)}
    entries = {name: blueprint(TOPOLOGY, name) for name in space.blueprints}
    return describe_host(space.slots, shapes, entries, relative)
