"""How many host runs are computed at the same time, and where."""

import os
from multiprocessing import current_process

from esper.environment.host_runs import HostRuns, LocalRuns, RunFactory
from esper.environment.worker_runs import WorkerRuns


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def place_runs(factory: RunFactory, envs: int, workers: int | None, threads: int | None) -> HostRuns:
    """The host runs of at most `envs` environments, in worker processes or in this process.

    Arguments:
        factory: builds the runs
        envs: maximum number of runs
        workers: number of processes; 0 is none; None is one for each core, and none on a GPU
        threads: threads of this process if there are no workers; None is one for each core
    """
    for key, value, least in (("workers", workers, 0), ("threads", threads, 1)):
        if value is not None and value < least:
            raise ValueError(f"environment.{key}={value}: must be at least {least}, or null.")
    device = factory.data_sets()[0].device
    on_cpu = device.type == "cpu"
    if workers and not on_cpu:
        raise ValueError(f"environment.workers={workers}: must be 0 or null for hosts on {device}; threads train them.")
    if workers is None:
        can_start = on_cpu and not current_process().daemon  # a daemonic process must not start others
        workers = min(envs, available_cores()) if can_start else 0
        workers = 0 if workers == 1 else workers  # a single process does the same without a second one
    if workers:
        return WorkerRuns(factory, min(envs, workers))
    return LocalRuns(factory, min(envs, threads or available_cores()))
