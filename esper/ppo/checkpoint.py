"""Checkpoints: plain data, written whole or not at all, and refused by name where they do not fit.

Besides what Lightning saves (weights, normalisers and the optimizer's state), each has an entry `esper`, the
`CheckpointMetadata`.
"""

import math
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from esper.ppo.collector import StoppedError
from esper.ppo.metadata import CheckpointMetadata
from esper.ppo.module import PPO

LAST, BEST = "last.ckpt", "best.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the old file and then takes its place, so that a kill at any moment leaves one that can be read."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f"{target.name}.part")
        with unfinished.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read."""

    metadata: CheckpointMetadata
    state_dict: Mapping[str, Tensor]
    optimizer_states: Sequence[dict[str, Any]]
    callbacks: Mapping[str, Any]  # what callbacks have saved, by their state key


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads plain data only; nothing in the file is executed."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no checkpoint.") from None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        raise ValueError(f"{path}: is no checkpoint that can be read; it is cut off, or of another program.") from None
    if not isinstance(found, dict) or "esper" not in found:
        raise ValueError(f"{path}: is a checkpoint, but not of esper.")
    try:
        metadata = CheckpointMetadata.from_dict(found["esper"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from None
    return Checkpoint(metadata, found["state_dict"], found.get("optimizer_states", []), found.get("callbacks", {}))


def check_fits(saved: CheckpointMetadata, module: PPO, path: Path) -> None:
    """Refuse a checkpoint of another network, by the key that differs."""
    for key, size in module.policy.sizes.items():
        if saved.sizes[key] != size:
            raise ValueError(f"policy.{key}={size}: the checkpoint {path} has {saved.sizes[key]}.")
    then = saved.layout.to_dict()
    for key, value in module.policy.layout.to_dict().items():
        if then[key] != value:
            raise ValueError(f"{key}: this run has {value}, but the checkpoint {path} {then[key]}.")


def restore_module(module: PPO, path: Path) -> Mapping[str, Any]:
    """Restore a module from a checkpoint; returns what callbacks have saved."""
    found = read_checkpoint(path)
    check_fits(found.metadata, module, path)
    module.load_state_dict(found.state_dict)
    module.optimizer_state = found.optimizer_states[0]
    module.counters = found.metadata.counters
    module.start_cost = found.metadata.start_cost
    if found.metadata.generator is not None:
        torch.set_rng_state(found.metadata.generator)
    return found.callbacks


class CheckpointCallback(Callback):
    """Keeps the last and the best.

    Arguments:
        directory: where
        every: rounds between saves; the end of a run is saved as well
        best: the metric whose highest value is kept as the best; None keeps none
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
