"""Checkpoints: plain data, written atomically, and checked against the run that loads them.

Lightning saves weights, normalisers and the optimizer's state. The entry `esper` is added to them: see
`CheckpointMetadata`.
"""

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from esper.files import write_buffered
from esper.ppo.collector import StoppedError
from esper.ppo.metadata import CheckpointMetadata
from esper.ppo.module import PPO

LAST, BEST = "last.ckpt", "best.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint as a whole or not at all: a full disk or a kill leaves the last one that was saved."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        write_buffered(Path(path), partial(torch.save, checkpoint))


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file."""

    metadata: CheckpointMetadata
    state_dict: Mapping[str, Tensor]
    optimizer_states: Sequence[dict[str, Any]]
    callbacks: Mapping[str, Any]  # the callbacks' states, by state key


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint with `weights_only=True`: no code in the file is executed."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: the checkpoint does not exist.") from None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        raise ValueError(f"{path}: is not a readable checkpoint; it is truncated, or of another program.") from None
    if not isinstance(content, dict) or "esper" not in content:
        raise ValueError(f"{path}: is a checkpoint, but not of esper: it has no entry esper.")
    try:
        metadata = CheckpointMetadata.from_dict(content["esper"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from None
    return Checkpoint(
        metadata, content["state_dict"], content.get("optimizer_states", []), content.get("callbacks", {})
    )


def check_fits(saved: CheckpointMetadata, module: PPO, path: Path) -> None:
    """Raise a ValueError that names the size or the part of the layout in which the checkpoint differs."""
    for key, size in module.policy.sizes.items():
        if saved.sizes[key] != size:
            raise ValueError(f"policy.{key}={size}: the checkpoint {path} has {saved.sizes[key]}.")
    saved_layout = saved.layout.to_dict()
    for key, value in module.policy.layout.to_dict().items():
        if saved_layout[key] != value:
            raise ValueError(f"{key}: this run has {value}, but the checkpoint {path} has {saved_layout[key]}.")


def restore_module(module: PPO, path: Path) -> Mapping[str, Any]:
    """Restore a module from a checkpoint and return the callbacks' states.

    The loaded weights are copied into the module and then freed, so that they are not in memory twice.
    """
    checkpoint = read_checkpoint(path)
    check_fits(checkpoint.metadata, module, path)
    module.load_state_dict(checkpoint.state_dict)
    module.optimizer_state = checkpoint.optimizer_states[0]
    module.counters = checkpoint.metadata.counters
    module.start_cost = checkpoint.metadata.start_cost
    if checkpoint.metadata.generator is not None:
        torch.set_rng_state(checkpoint.metadata.generator)
    return checkpoint.callbacks


class CheckpointCallback(Callback):
    """Saves `last.ckpt` and `best.ckpt`.

    Arguments:
        directory: directory of the checkpoints
        every: rounds between saves of `last.ckpt`; it is also saved when the run ends
        best: metric whose highest value is saved as `best.ckpt`; None saves no best
    """

    def __init__(self, directory: str | Path, *, every: int, best: str | None) -> None:
        if every < 1:
            raise ValueError(f"callbacks.checkpoints.every={every}: must be at least 1.")
        self._directory, self._every, self._metric = Path(directory), every, best
        self._highest: float | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        value = None if self._metric is None else pl_module.latest_metrics.get(self._metric)
        if value is not None and math.isfinite(value) and (self._highest is None or value > self._highest):
            self._highest = value
            trainer.save_checkpoint(self._directory / BEST)
        if pl_module.counters.rounds % self._every == 0:
            self._save_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_last(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, StoppedError | SIGTERMException):
            self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(self._directory / LAST)

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric, "highest": self._highest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["metric"] == self._metric:
            self._highest = state_dict["highest"]
