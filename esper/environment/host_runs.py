"""Where the host runs of a round are: in this process, computed by threads, or in worker processes."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from torch import Tensor

from esper.data import Data
from esper.environment.host_run import HostRun, HostRunOptions
from esper.environment.host_task import HostTask
from esper.growth import GrowthOptimizer

Change = Callable[[HostRun], None]  # such as partial(HostRun.remove, slot="block1")
Computation = Callable[[HostRun], Tensor]  # such as partial(HostRun.evaluate, settings={}, split="test")


@dataclass(frozen=True)
class RunOrigin:
    """What the run of an episode is built from."""

    episode_seed: int
    host: str
    variant: str | None = None  # of the host; None is the host itself
    lr_scale: float = 1.0


@dataclass(frozen=True)
class RunFactory:
    """Builds host runs, in any process."""

    tasks: Mapping[str, HostTask]  # by the name of the host
    optimizer: Callable[..., GrowthOptimizer]
    options: HostRunOptions  # but for the batch, which is that of the task

    def build(self, origin: RunOrigin) -> HostRun:
        """The run of an episode at its start."""
        task = self.tasks[origin.host]
        lr_scale = task.lr_scale * origin.lr_scale
        return HostRun(
            origin.episode_seed,
            build=task.build if origin.variant is None else task.variants[origin.variant],
            optimizer=self.optimizer if lr_scale == 1 else partial(self.optimizer, lr_scale=lr_scale),
            data=task.data,
            options=replace(self.options, batch=task.batch),
            variants=task.variants,
        )

    def data_sets(self) -> list[Data]:
        """The data of all tasks, each once."""
        return list({id(task.data): task.data for task in self.tasks.values()}.values())


class HostRuns(Protocol):
    """The host runs of a round, one for each environment."""

    parallel: int  # runs that are computed at the same time

    def start(self, episodes: Sequence[RunOrigin]) -> None:
        """Replace all runs by new ones, one for each environment."""

    def change(self, env: int, change: Change) -> None:
        """Change a run before its next computation; changes are made in order."""

    def compute(self, computations: Mapping[int, Computation]) -> list[Tensor]:
        """Compute with some runs in parallel, by environment; results in the order of the mapping."""

    def fetch(self, env: int) -> HostRun:
        """The run of an environment; from a worker process it is a copy."""

    def seconds(self, env: int) -> dict[str, float]:
        """Seconds that a run has taken so far, by phase."""

    def close(self) -> None: ...


class LocalRuns:
    """Host runs in this process.

    Arguments:
        factory: builds the runs
        threads: runs that are computed at the same time
    """

    def __init__(self, factory: RunFactory, threads: int) -> None:
        self.parallel = threads
        self._factory = factory
        self._runs: list[HostRun] = []
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def start(self, episodes: Sequence[RunOrigin]) -> None:
        self._runs = [self._factory.build(episode) for episode in episodes]

    def change(self, env: int, change: Change) -> None:
        change(self._runs[env])

    def compute(self, computations: Mapping[int, Computation]) -> list[Tensor]:
        def compute_one(env: int) -> Tensor:
            return computations[env](self._runs[env])

        return list(map(compute_one, computations) if self._pool is None else self._pool.map(compute_one, computations))

    def fetch(self, env: int) -> HostRun:
        return self._runs[env]

    def seconds(self, env: int) -> dict[str, float]:
        return self._runs[env].seconds

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
