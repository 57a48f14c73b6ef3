"""A worker process: it holds host runs and computes with them, one at a time."""

import ctypes
import os
import pickle
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from esper.blueprints import Blueprint, add_missing
from esper.environment.host_run import HostRun
from esper.environment.host_runs import Change, Computation, RunFactory, RunOrigin
from esper.environment.transfer import dump_run, load_run, load_shared

CLOSED = (EOFError, OSError)  # errors of a connection whose other end was closed, or whose process has ended

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGE_BLOCK = 2**28  # bytes; features of a validation batch are smaller


@dataclass(frozen=True)
class Task:
    """What a worker does next with the run of an environment."""

    env: int
    origin: RunOrigin | bytes | None  # a new run, the state of a run, or None: the worker has it
    changes: Sequence[Change]
    computation: Computation | None


@dataclass(frozen=True)
class TaskResult:
    """The result of a task, and the seconds that its run has taken so far."""

    values: Tensor | None
    seconds: dict[str, float]


@dataclass(frozen=True)
class Setup:
    """What every worker gets once."""

    factory: RunFactory
    blueprints: Sequence[Blueprint]  # with those that the user registered


def run_worker(tasks: Connection, transfers: Connection, setup: bytes, tensors: list[Tensor]) -> None:
    """Main function of a worker. It ends when the other ends of its connections are closed.

    Arguments:
        tasks: receives a `Task`, and sends a `TaskResult` or an exception; None removes all runs
        transfers: receives an environment and whether to keep its run, and sends the state of that run
        setup, tensors: a `Setup`, from `dump_shared`
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    content: Setup = load_shared(setup, tensors)
    add_missing(content.blueprints)
    runs: dict[int, HostRun] = {}
    threading.Thread(target=_serve_transfers, args=(transfers, runs, content.factory), daemon=True).start()
    with suppress(*CLOSED):
        while True:
            task: Task | None = pickle.loads(tasks.recv_bytes())
            if task is None:
                runs.clear()
            else:
                tasks.send_bytes(_run_task(task, runs, content.factory))


def keep_freed_memory() -> None:
    """Make glibc reuse large blocks of memory: by default it returns them, and every use faults their pages in again.

    Validation batches then take half the time in a new process. Elsewhere than with glibc nothing happens.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            mallopt(option, LARGE_BLOCK)


def _run_task(task: Task, runs: dict[int, HostRun], factory: RunFactory) -> bytes:
    """The `TaskResult` of a task, or the exception that it raised, as bytes."""
    try:
        if isinstance(task.origin, bytes):
            runs[task.env] = load_run(task.origin, factory.data_sets())
        elif task.origin is not None:
            runs[task.env] = factory.build(task.origin)
        run = runs[task.env]
        for change in task.changes:
            change(run)
        values = None if task.computation is None else task.computation(run)
        return pickle.dumps(TaskResult(values, run.seconds))
    except Exception as error:  # it is raised in the main process
        error.add_note(traceback.format_exc())
        return _dump_error(error)


def _dump_error(error: Exception) -> bytes:
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # an exception with other arguments than its message may fail here
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return content


def _serve_transfers(transfers: Connection, runs: dict[int, HostRun], factory: RunFactory) -> None:
    """Send the states of runs that are not computed at the moment; end the process with its main process."""
    try:
        while True:
            env, keep = pickle.loads(transfers.recv_bytes())
            try:
                state = pickle.dumps(dump_run(runs[env], factory.data_sets()))
            except Exception as error:  # it is raised in the main process
                state = _dump_error(error)
            if not keep:
                runs.pop(env, None)
            transfers.send_bytes(state)
    except CLOSED:
        os._exit(0)  # even in the middle of a task: nobody waits for its result
