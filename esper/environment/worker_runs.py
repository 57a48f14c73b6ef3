"""Host runs in worker processes. An episode is bit-equal in any worker, and to one in this process."""

import pickle
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from torch import Tensor
from torch.multiprocessing import get_all_start_methods, get_context, get_start_method, set_start_method

from esper.blueprints import blueprints, topologies
from esper.environment.host_run import HostRun
from esper.environment.host_runs import Change, Computation, RunFactory, RunOrigin
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
    has_answered: bool = False


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
        util.Finalize(self, _shut_down, (self._workers,), exitpriority=10)  # before multiprocessing waits for them

    def start(self, episodes: Sequence[RunOrigin]) -> None:
        self._episodes = list(episodes)
        self._owners: list[_Worker | None] = [None] * len(episodes)
        self._changes: list[list[Change]] = [[] for _ in episodes]
        self._seconds: list[dict[str, float]] = [{} for _ in episodes]
        self._latest = [0.0] * len(episodes)  # seconds of each run's latest task
        with self._closed_on_error():
            if not self._workers:
                self._launch()
            while any(worker.env is not None for worker in self._workers):
                self._receive()  # what is left of a round that ended with an error
            for worker in self._workers:
                with _lost_worker(worker):
                    worker.tasks.send_bytes(pickle.dumps(None))

    def change(self, env: int, change: Change) -> None:
        self._changes[env].append(change)

    def compute(self, computations: Mapping[int, Computation | None]) -> list[Tensor]:
        if not self._workers:
            raise RuntimeError("there are no worker processes; call reset first.")
        waiting = sorted(computations, key=lambda env: -self._latest[env])  # the longest first
        results: dict[int, TaskResult | Exception] = {}
        with self._closed_on_error():
            while len(results) < len(computations):
                for worker in self._workers:
                    if worker.env is None and waiting:
                        env = next((env for env in waiting if self._owners[env] in (worker, None)), waiting[0])
                        waiting.remove(env)
                        self._send(worker, env, computations[env])
                results |= self._receive()
                if any(isinstance(result, Exception) for result in results.values()):
                    break
        return list(self._read_results({env: results[env] for env in computations if env in results}))

    def fetch(self, env: int) -> HostRun:
        self.compute({env: None})  # makes pending changes
        owner = self._owners[env]
        assert owner is not None
        with self._closed_on_error():
            state = self._request_state(owner, env, keep=True)
        return load_run(state, self._factory.data_sets())

    def seconds(self, env: int) -> dict[str, float]:
        return self._seconds[env]

    def close(self) -> None:
        _shut_down(self._workers)

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
                self._workers.append(_Worker(process, tasks, transfers))
                far_tasks.close()  # the worker has the only copy, so that its end closes the connection
                far_transfers.close()

    def _send(self, worker: _Worker, env: int, computation: Computation | None) -> None:
        """Give a worker a task, with the state of its run if another worker has it."""
        owner = self._owners[env]
        origin: RunOrigin | bytes | None = None
        if owner is None:
            origin = self._episodes[env]
        elif owner is not worker:
            origin = self._request_state(owner, env, keep=False)
        task = pickle.dumps(Task(env, origin, self._changes[env], computation))
        with _lost_worker(worker):
            worker.tasks.send_bytes(task)
        self._owners[env], worker.env, self._changes[env] = worker, env, []

    def _receive(self) -> dict[int, TaskResult | Exception]:
        """The results of the next tasks that end, by environment."""
        busy = {worker.tasks: worker for worker in self._workers if worker.env is not None}
        results: dict[int, TaskResult | Exception] = {}
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]
            assert worker.env is not None
            with _lost_worker(worker):
                results[worker.env] = pickle.loads(worker.tasks.recv_bytes())
            worker.env, worker.has_answered = None, True
        return results

    def _read_results(self, results: Mapping[int, TaskResult | Exception]) -> Iterator[Tensor]:
        """The values of results; raises the first error among them."""
        for result in results.values():
            if isinstance(result, Exception):
                raise result
        for env, result in results.items():
            assert isinstance(result, TaskResult)
            self._latest[env] = sum(result.seconds.values()) - sum(self._seconds[env].values())
            self._seconds[env] = result.seconds
            if result.values is not None:
                yield result.values

    def _request_state(self, owner: _Worker, env: int, *, keep: bool) -> bytes:
        """The state of a run that no worker computes with at the moment."""
        with _lost_worker(owner):
            owner.transfers.send_bytes(pickle.dumps((env, keep)))
            state = pickle.loads(owner.transfers.recv_bytes())
        if isinstance(state, Exception):
            raise state
        assert isinstance(state, bytes)
        return state

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """End all workers on any error or interrupt inside: messages may be left in the connections.

        The next round starts new workers.
        """
        try:
            yield
        except BaseException:
            self.close()
            raise


@contextmanager
def _lost_worker(worker: _Worker) -> Iterator[None]:
    """Raise a WorkerLostError if the connection to a worker is closed."""
    try:
        yield
    except CLOSED:
        worker.process.join(EXIT_SECONDS)
        code = worker.process.exitcode
        if code is not None and code < 0:
            reason = f"was killed by {signal.Signals(-code).name}"
        else:
            reason = f"ended with exit code {code}"
            if not worker.has_answered:
                reason += '; a script must call esper under if __name__ == "__main__"'
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


def _shut_down(workers: list[_Worker]) -> None:
    """End worker processes, which end when their connections are closed, and remove them from the list."""
    for worker in workers:
        worker.tasks.close()
        worker.transfers.close()
    for worker in workers:
        worker.process.join(EXIT_SECONDS)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
    workers.clear()
