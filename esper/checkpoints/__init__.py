"""Trained controllers: find, load, save and export them; resume runs and evaluations."""

from esper.checkpoints.controllers import (
    TrainedController,
    load_controller,
    load_controllers,
    load_start_weights,
    save_controller,
)
from esper.checkpoints.origin import read_origin
from esper.checkpoints.task import (
    LOCAL_KEYS,
    add_task_overrides,
    apply_trained_values,
    checkpoint_names,
    describe_differences,
    resolve_checkpoint_paths,
    task_settings,
)

__all__ = [
    "LOCAL_KEYS",
    "TrainedController",
    "add_task_overrides",
    "apply_trained_values",
    "checkpoint_names",
    "describe_differences",
    "load_controller",
    "load_controllers",
    "load_start_weights",
    "read_origin",
    "resolve_checkpoint_paths",
    "save_controller",
    "task_settings",
]
