"""Objects as bytes for another process: the tensors of data sets are shared, host runs are copied."""

import pickle
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from shutil import disk_usage
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from torch import Tensor

from esper.data import Data
from esper.environment.host_run import HostRun

SHARED_MEMORY = Path("/dev/shm")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Also pickles what a user defines in a script or a notebook; `refer` replaces an object by a reference."""

    def __init__(self, file: BytesIO, refer: Callable[[object], object]) -> None:
        super().__init__(file)
        self._refer = refer

    def persistent_id(self, value: object) -> object:
        return self._refer(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, resolve: Callable[[Any], object]) -> None:
        super().__init__(file)
        self._resolve = resolve

    def persistent_load(self, reference: Any) -> object:
        return self._resolve(reference)


def _dump(value: object, refer: Callable[[object], object]) -> bytes:
    file = BytesIO()
    _Pickler(file, refer).dump(value)
    return file.getvalue()


def dump_shared(value: object) -> tuple[bytes, list[Tensor]]:
    """An object as bytes, and its tensors, which are moved to shared memory."""
    tensors: dict[int, Tensor] = {}

    def refer(part: object) -> object:
        if not isinstance(part, Tensor):
            return None
        tensors[id(part)] = part
        return list(tensors).index(id(part))

    content = _dump(value, refer)
    private = [tensor for tensor in tensors.values() if not tensor.is_shared()]  # type: ignore[no-untyped-call]
    _check_space(private)
    return content, [tensor.share_memory_() for tensor in tensors.values()]  # type: ignore[no-untyped-call]


def _check_space(tensors: list[Tensor]) -> None:
    """Refuse tensors that do not fit into shared memory, where writing them would kill the process."""
    needed = sum(tensor.nbytes for tensor in tensors)
    if SHARED_MEMORY.is_dir() and needed > (free := disk_usage(SHARED_MEMORY).free):
        raise ValueError(
            f"environment.workers: the data set needs {needed / 1e6:,.0f} MB of shared memory, but {SHARED_MEMORY} has "
            f"{free / 1e6:,.0f} MB; enlarge it (docker run --shm-size), or set environment.workers=0."
        )


def load_shared(content: bytes, tensors: list[Tensor]) -> Any:
    """The object that `dump_shared` was given; its tensors are those of the other process."""
    return _Unpickler(BytesIO(content), tensors.__getitem__).load()


def dump_run(run: HostRun, data_sets: Sequence[Data]) -> bytes:
    """The state of a run as bytes, without its data set, which is one of `data_sets`."""
    numbers = {id(data): number for number, data in enumerate(data_sets)}
    return _dump(run, lambda part: numbers.get(id(part)))


def load_run(content: bytes, data_sets: Sequence[Data]) -> HostRun:
    """A run as it was when `dump_run` was called."""
    run: HostRun = _Unpickler(BytesIO(content), data_sets.__getitem__).load()
    return run
