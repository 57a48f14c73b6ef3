"""Plans of the many-task oracle: when each slot gets which seed. Their scores are without noise.

Only the final score counts, and a seed that is removed before has only cost, so plans prune nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from esper.environment.oracle_tasks import OracleTasks, train_step

SWEEPS = 10  # maximum number of passes over the slots in a local search
DEPTHS = 3  # parts of a host, by relative depth, that a fixed schedule treats differently
PLANS_AT_ONCE = 100_000  # rows that are computed together, to save memory


@dataclass(frozen=True)
class Plans:
    """One plan in each row."""

    blueprint: Tensor  # int64 [plans, slots]; -1 for no seed
    start: Tensor  # int64 [plans, slots], the step of the germination

    def __getitem__(self, rows: Tensor) -> "Plans":
        return Plans(self.blueprint[rows], self.start[rows])


def plan_scores(tasks: OracleTasks, plans: Plans, steps: int) -> Tensor:
    """The final score of each plan in the task of the same row, without noise: [plans]."""
    host_training = torch.zeros(len(tasks))
    seed_training = torch.zeros(plans.blueprint.shape)
    cost, gain = tasks.of_seeds(tasks.cost, plans.blueprint), tasks.of_seeds(tasks.gain, plans.blueprint)
    for step in range(steps):
        cost_now = torch.where(plans.start <= step, cost, 0.0)
        host_training, seed_training = train_step(host_training, seed_training, cost_now, steps)
    committed = plans.start < steps - 1  # a seed of the last step is not healthy yet
    return tasks.host_score(host_training) + (gain * tasks.trained_share(seed_training) * committed).sum(1)


def no_growth(tasks: OracleTasks) -> Plans:
    """The empty plan for each task."""
    start = torch.zeros(tasks.exists.shape, dtype=torch.int64)
    return Plans(start - 1, start)


def optimum(tasks: OracleTasks, steps: int) -> tuple[Plans, Tensor]:
    """The best plan of each task for who knows the task, and its score [tasks].

    A local search from several plans, which replaces the seed of one slot at a time by the best blueprint and moment.
    For a single slot this is exhaustive. Any number of seeds may germinate in the same step, so that it is a bound for
    action spaces with one germination in a step and for those with several.
    """
    blueprints = tasks.gain.shape[2]
    options = torch.tensor([(-1, 0), *product(range(blueprints), range(steps - 1))])  # [options, blueprint and start]
    best, best_score = no_growth(tasks), torch.full((len(tasks),), -torch.inf)
    for blueprint in range(-1, blueprints):  # in all slots
        plans = Plans(torch.where(tasks.exists, blueprint, -1), torch.full_like(best.start, steps // 3))
        plans, score = _improve(tasks, plans, options, steps)
        better = score > best_score
        best_score = torch.maximum(best_score, score)
        best = Plans(
            torch.where(better.unsqueeze(1), plans.blueprint, best.blueprint),
            torch.where(better.unsqueeze(1), plans.start, best.start),
        )
    return best, best_score


def _improve(tasks: OracleTasks, plans: Plans, options: Tensor, steps: int) -> tuple[Plans, Tensor]:
    """Change one slot at a time as long as any score rises."""
    score = plan_scores(tasks, plans, steps)
    rows = torch.arange(len(tasks)).repeat_interleave(len(options))
    for _ in range(SWEEPS):
        before = score
        for slot in range(plans.start.shape[1]):
            tried = plans[rows]
            tried.blueprint[:, slot], tried.start[:, slot] = options.repeat(len(tasks), 1).unbind(1)
            tried.blueprint[~tasks.exists[rows]] = -1
            scores = plan_scores(tasks[rows], tried, steps).view(len(tasks), -1)
            score, option = scores.max(1)
            plans = tried[torch.arange(len(tasks)) * len(options) + option]
        if not (score > before).any():
            break
    return plans, score


@dataclass(frozen=True)
class FixedSchedule:
    """The same for every host: a blueprint for each part of its depth, and when they germinate."""

    blueprints: tuple[int, ...]  # of slots in each part by depth; -1 for no seed
    start: int  # step of the first germination; one more follows in each step
    from_output: bool  # whether the slots next to the output come first

    def plans(self, exists: Tensor) -> Plans:
        """The plan in each host; `exists`, bool [hosts, slots], is whether it has a slot."""
        count, place = exists.sum(1, keepdim=True), torch.arange(exists.shape[1])
        part = (place * DEPTHS // count).clamp(max=DEPTHS - 1)
        blueprint = torch.where(exists, torch.tensor(self.blueprints)[part], -1)
        planted = (blueprint >= 0).long()
        before = planted.cumsum(1) - planted  # seeds in slots before this one
        if self.from_output:
            before = planted.sum(1, keepdim=True) - 1 - before
        return Plans(blueprint, self.start + torch.where(planted > 0, before, 0))


def best_fixed(tasks: OracleTasks, steps: int) -> FixedSchedule:
    """The schedule with the highest mean score over some tasks: all blueprints at all depths, at any moment."""
    schedules = list(_fixed_schedules(tasks.gain.shape[2], steps))
    chunk = max(1, PLANS_AT_ONCE // len(tasks))
    means: list[Tensor] = []
    for first in range(0, len(schedules), chunk):
        some = [schedule.plans(tasks.exists) for schedule in schedules[first : first + chunk]]
        plans = Plans(torch.cat([each.blueprint for each in some]), torch.cat([each.start for each in some]))
        rows = torch.arange(len(tasks)).repeat(len(some))
        means.append(plan_scores(tasks[rows], plans, steps).view(len(some), -1).mean(1))
    return schedules[int(torch.cat(means).argmax())]


def _fixed_schedules(blueprints: int, steps: int) -> Iterator[FixedSchedule]:
    for chosen in product(range(-1, blueprints), repeat=DEPTHS):
        for start, from_output in product(range(0, steps - 1, 2), (False, True)):
            yield FixedSchedule(chosen, start, from_output)
