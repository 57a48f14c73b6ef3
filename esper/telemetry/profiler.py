"""torch's profiler with the activities that a device has, its output in the run's directory."""

from pathlib import Path

import torch
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerActivity

BY_DEVICE = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What is recorded: the CPU, and the device's own where torch can."""
    wanted = getattr(ProfilerActivity, BY_DEVICE.get(device.type, ""), None)
    can = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
    return [ProfilerActivity.CPU, *([wanted] if wanted is not None and wanted in can else [])]


def torch_profiler(directory: str | Path, device: torch.device, *, filename: str, rows: int) -> PyTorchProfiler:
    """Arguments: the run's directory and device; the file's name; rows of the table that it writes.

    Everything is recorded, without a schedule: a step of the trainer is a whole round here.
    """
    return PyTorchProfiler(
        dirpath=str(directory), filename=filename, activities=activities(device), row_limit=rows,
        export_to_chrome=True, emit_nvtx=False, schedule=None,
    )  # fmt: skip
