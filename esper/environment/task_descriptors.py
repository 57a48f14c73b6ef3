"""Descriptors of the tasks of a distribution: what a critic may know of a task, but no policy."""

import math
from collections.abc import Mapping

import torch

from esper.environment.clock import Clock
from esper.environment.host_pool import HostPool
from esper.environment.host_task import HostTask
from esper.environment.start import EpisodeStart

LOG_SCALES = {  # a typical value, which is 0, and the factor of it that is 1
    "parameters": (1e4, 100.0),
    "sample_cost": (1e7, 100.0),  # FLOPs of training on a sample, without seeds
    "budget": (1000.0, 10.0),  # training batches of the host without seeds
    "lr_scale": (1.0, 2.0),
    "batch": (64.0, 2.0),
    "train_samples": (10_000.0, 10.0),
    "classes": (10.0, 100.0),  # or tokens
}
SCORE_POINTS, GAIN_POINTS = 100.0, 20.0  # that are 1


class TaskDescriptors:
    """Descriptors of all tasks of a pool; without families of tasks there are none.

    Arguments:
        pool: the tasks
        clock: decides their budgets
        steps: decisions in an episode
    """

    def __init__(self, pool: HostPool, clock: Clock, *, steps: int) -> None:
        tasks = pool.tasks()
        families = list(dict.fromkeys(task.family for task in tasks.values() if task.family))
        slots = dict(zip(pool.names, pool.exists_by_host().float().mean(1).tolist(), strict=True))
        rows = []
        for name, costs in pool.items() if families else ():
            task, sample = tasks[name], float(costs.train({}, {}))
            budget = clock.budget(sample * task.batch, steps, EpisodeStart(), task.budget_batches)
            logs = {
                "parameters": costs.parameters,
                "sample_cost": sample,
                "budget": budget / (sample * task.batch),
                "lr_scale": task.lr_scale,
                "batch": task.batch,
                "train_samples": task.data.size("train"),
                "classes": task.data.options,
            }
            rows.append(
                {f"family={family}": float(family == task.family) for family in families}
                | {"slots": slots[name], "label_noise": task.label_noise}
                | _scale_logs(logs)
                | _known_scores(task)
            )
        self.names: tuple[str, ...] = tuple(rows[0]) if rows else ()
        table = [[row[name] for name in self.names] for row in rows]
        self.values = torch.tensor(table).view(len(pool), len(self.names))  # [tasks, names], about -1 to 1


def _scale_logs(values: Mapping[str, float]) -> dict[str, float]:
    scales = {name: LOG_SCALES[name] for name in values}
    return {name: math.log(values[name] / typical) / math.log(factor) for name, (typical, factor) in scales.items()}


def _known_scores(task: HostTask) -> dict[str, float]:
    """The score without growth and the gain of the best plan, each with whether it is known; 0 if it is not."""
    none = None if task.known is None else task.known.none
    best = None if task.known is None or task.known.best is None else task.known.best - task.known.none
    return {
        "none": 0.0 if none is None else none / SCORE_POINTS,
        "none_known": float(none is not None),
        "best_gain": 0.0 if best is None else best / GAIN_POINTS,
        "best_gain_known": float(best is not None),
    }
