"""Host runs in worker processes. An episode is bit-equal in any worker, and to one in this process."""

import pickle
import signal
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from torch import Tensor
from torch.multiprocessing import get_all_start_methods, get_context, get_start_method, set_start_method

from esper.blueprints import blueprints, topologies
from esper.environment.host_run import HostRun
from esper.environment.host_runs import Change, Computation, RunFactory
from esper.environment.transfer import dump_shared, load_run
from esper.environment.worker import CLOSED, Setup, Task, TaskResult, run_worker

EXIT_SECONDS = 5.0  # a worker that has not ended by then is killed


class WorkerLostError(RuntimeError):
    """A worker process has ended before its task."""


@dataclass
class _Worker:
    """A worker process and the connections to it."""

    process: BaseProcess
    tasks: Connection
    transfers: Connection
    env: int | None = None  # the environment of its current task


class WorkerRuns:
    """Host runs in worker processes, which start with the first round.

    A worker that has finished its runs takes over a run from another one, so that runs of unequal cost are balanced.

    Arguments:
        factory: builds the runs; must be on the CPU
        workers: number of processes
    """

    def __init__(self, factory: RunFactory, workers: int) -> None:
        self.parallel = workers
        self._factory = factory
        self._workers: list[_Worker] = []
        self._episodes: list[tuple[int, str]] = []

    def start(self, episodes: Sequence[tuple[int, str]]) -> None:
        if not self._workers:
            self._launch()
        self._finish_tasks()
        for worker in self._workers:
            worker.tasks.send_bytes(pickle.dumps(None))
        self._episodes = list(episodes)
        self._owners: list[_Worker | None] = [None] * len(episodes)
        self._changes: list[list[Change]] = [[] for _ in episodes]
        self._seconds: list[dict[str, float]] = [{} for _ in episodes]
        self._latest = [0.0] * len(episodes)  # seconds of each run's latest task

    def change(self, env: int, change: Change) -> None:
        self._changes[env].append(change)

    def compute(self, computations: Mapping[int, Computation | None]) -> list[Tensor]:
        self._finish_tasks()
        waiting = sorted(computations, key=lambda env: -self._latest[env])  # the longest first
        results: dict[int, Tensor | None] = {}
        while len(results) < len(computations):
            for worker in self._workers:
                if worker.env is None and waiting:
                    env = next((env for env in waiting if self._owners[env] in (worker, None)), waiting[0])
                    waiting.remove(env)
                    self._send(worker, env, computations[env])
            results |= self._receive()
        return [value for env in computations if (value := results[env]) is not None]

    def fetch(self, env: int) -> HostRun:
        self.compute({env: None})  # makes pending changes
        owner = self._owners[env]
        assert owner is not None
        return load_run(self._request_state(owner, env, keep=True), self._factory.data)

    def seconds(self, env: int) -> dict[str, float]:
        return self._seconds[env]

    def close(self) -> None:
        if self._workers:
            self._finalizer()
            self._workers = []

    def _launch(self) -> None:
        if get_start_method(allow_none=True) not in (None, *get_all_start_methods()):
            set_start_method("spawn", force=True)  # jobs of joblib have one that new processes do not know
        context = get_context("spawn")
        entries = [entry for topology in topologies() for entry in blueprints(topology).values()]
        setup, tensors = dump_shared(Setup(self._factory, entries))
        with _blocked_signals():
            for index in range(self.parallel):
                (tasks, far_tasks), (transfers, far_transfers) = context.Pipe(), context.Pipe()
                arguments = (far_tasks, far_transfers, setup, tensors)
                process = context.Process(target=run_worker, args=arguments, name=f"worker {index}", daemon=True)
                process.start()
                far_tasks.close()  # the worker has the only copy, so that its end closes the connection
                far_transfers.close()
                self._workers.append(_Worker(process, tasks, transfers))
        self._finalizer = weakref.finalize(self, _shut_down, list(self._workers))

    def _send(self, worker: _Worker, env: int, computation: Computation | None) -> None:
        """Give a worker a task, with the state of its run if another worker has it."""
        owner = self._owners[env]
        origin: tuple[int, str] | bytes | None = None
        if owner is None:
            origin = self._episodes[env]
        elif owner is not worker:
            origin = self._request_state(owner, env, keep=False)
        task = pickle.dumps(Task(env, origin, self._changes[env], computation))
        with _lost_worker(worker):
            worker.tasks.send_bytes(task)
        self._owners[env], worker.env, self._changes[env] = worker, env, []

    def _receive(self) -> dict[int, Tensor | None]:
        """The results of the next tasks that end, by environment."""
        busy = {worker.tasks: worker for worker in self._workers if worker.env is not None}
        results: dict[int, Tensor | None] = {}
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]
            with _lost_worker(worker):
                result: TaskResult | Exception = pickle.loads(worker.tasks.recv_bytes())
            env, worker.env = worker.env, None
            assert env is not None
            if isinstance(result, Exception):
                raise result
            self._latest[env] = sum(result.seconds.values()) - sum(self._seconds[env].values())
            self._seconds[env], results[env] = result.seconds, result.values
        return results

    def _finish_tasks(self) -> None:
        """Wait for the tasks of a round that was interrupted."""
        while any(worker.env is not None for worker in self._workers):
            self._receive()

    def _request_state(self, owner: _Worker, env: int, *, keep: bool) -> bytes:
        """The state of a run that no worker computes with at the moment."""
        with _lost_worker(owner):
            owner.transfers.send_bytes(pickle.dumps((env, keep)))
            return owner.transfers.recv_bytes()


@contextmanager
def _lost_worker(worker: _Worker) -> Iterator[None]:
    """Raise a WorkerLostError if the connection to a worker is closed."""
    try:
        yield
    except CLOSED:
        worker.process.join(EXIT_SECONDS)
        code = worker.process.exitcode or 0
        if code < 0:
            reason = f"was killed by {signal.Signals(-code).name}"
        else:
            reason = f'ended with exit code {code}; a script must call esper under if __name__ == "__main__"'
        raise WorkerLostError(
            f"environment.workers: {worker.process.name} (process {worker.process.pid}) {reason}"
        ) from None


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Start processes that SIGINT and SIGTERM do not end: Ctrl-C reaches them too, but this process decides."""
    resource_tracker.ensure_running()  # which would unblock them
    numbers = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _shut_down(workers: Sequence[_Worker]) -> None:
    """End worker processes: each ends when its connections are closed."""
    for worker in workers:
        worker.tasks.close()
        worker.transfers.close()
    for worker in workers:
        worker.process.join(EXIT_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
