"""What tasks are like: size, slots, cost, and how long an episode takes."""

import time
from dataclasses import dataclass

from esper.environment import Environment
from esper.environment.host_run import HostRun, StepPlan
from esper.environment.host_runs import RunOrigin
from esper.growth import Mode, SeedSetting
from esper.lifecycle import Blend

WARM_UP_BATCHES, TIMED_BATCHES = 2, 8


@dataclass(frozen=True)
class TaskRow:
    """One task in numbers."""

    name: str
    data: str
    parameters: int
    slots: int
    sample_mflops: float  # of training on one sample, without seeds
    budget_gflops: float
    bare_batches: float  # that the budget pays for, without seeds
    full_batches: float  # and with a seed in every slot
    seconds: float  # of an episode without seeds, on one core


def describe_task(environment: Environment, episode_seed: int, blueprint: str) -> TaskRow:
    """The row of an episode's task; seconds are measured with a few batches.

    Arguments:
        environment: under a budget
        episode_seed: any episode of the task
        blueprint: fills every slot in `full_batches`
    """
    pool = environment.host_pool
    task, costs, slots = pool.task(episode_seed), pool.costs(episode_seed), pool.slot_names(episode_seed)
    seeds = {slot: costs.seed(slot, blueprint, Blend.ADD) for slot in slots}
    settings = dict.fromkeys(slots, SeedSetting(Mode.BLENDED, 1.0))
    budget, sample = environment.budget_flops(episode_seed), costs.train({}, {})
    bare = budget / (sample * task.batch)
    run = environment.factory.build(RunOrigin(episode_seed, pool.host_name(episode_seed)))
    return TaskRow(
        name=pool.host_name(episode_seed),
        data=f"{task.data.name}, {task.data.options:,} tokens" if task.data.kind == "text" else task.data.name,
        parameters=costs.parameters,
        slots=len(slots),
        sample_mflops=sample / 1e6,
        budget_gflops=budget / 1e9,
        bare_batches=bare,
        full_batches=budget / (costs.train(seeds, settings) * task.batch),
        seconds=bare * _batch_seconds(run),
    )


def _batch_seconds(run: HostRun) -> float:
    """Seconds of one training batch."""
    for batches in (WARM_UP_BATCHES, TIMED_BATCHES):
        started = time.perf_counter()
        run.train_and_measure(StepPlan({}, {}, (), batches, (0.0, 0.0), measure=False))
    return (time.perf_counter() - started) / TIMED_BATCHES
