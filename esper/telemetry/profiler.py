"""torch's profiler with the activities of a device; it writes into the run's directory."""

from pathlib import Path

import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerActivity

ACTIVITY_NAMES = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}


def activities(device: torch.device) -> list[ProfilerActivity]:
    """The CPU, and the device's own activity if torch supports it."""
    own = getattr(ProfilerActivity, ACTIVITY_NAMES.get(device.type, ""), None)
    supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    return [ProfilerActivity.CPU, *([own] if own is not None and own in supported else [])]


def torch_profiler(directory: str | Path, device: torch.device, *, filename: str, rows: int) -> PyTorchProfiler:
    """torch's profiler for a whole run: without a schedule, since a step of the Trainer is a whole round.

    Arguments:
        directory: directory of the run
        device: device that is profiled, besides the CPU
        filename: prefix of the files' names
        rows: rows of the table that is written
    """
    return PyTorchProfiler(
        dirpath=str(directory), filename=filename, activities=activities(device), row_limit=rows,
        export_to_chrome=True, emit_nvtx=False, schedule=None,
    )  # fmt: skip
