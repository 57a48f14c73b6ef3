"""Checkpoints: plain data, written whole or not at all, and refused by name where they do not fit.

Beside what Lightning saves (weights, normalisers and the optimizer's state), each has an entry `esper`:

| version | holds |
|---|---|
| 1 | layout, sizes of the policy, mode of compilation, seed, counters, state of torch's generator |

All randomness of a run follows from its seed and its counters, so that these are the state of its generators; that of
torch's own generator is kept for modules of users which draw from it. Compilation is no part of the weights: networks
are compiled in place, so that names do not change, and a resumed run compiles by its own configuration.
"""

import math
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from esper.ppo.collector import StoppedError
from esper.ppo.module import PPO, VERSION, Counters

LAST, BEST = "last.ckpt", "best.ckpt"


class AtomicIO(TorchCheckpointIO):
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


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint as plain data; nothing in it is ever executed."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no checkpoint.") from None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        raise ValueError(f"{path}: is no checkpoint that can be read; it is cut off, or of another program.") from None
    if not isinstance(found, dict) or "esper" not in found:
        raise ValueError(f"{path}: is a checkpoint, but not of esper.")
    version = found["esper"].get("version", 0)
    if not 1 <= version <= VERSION:
        raise ValueError(f"{path}: has version {version}; this esper reads 1 to {VERSION}.")
    return found


def fits(found: dict[str, Any], module: PPO, path: Path) -> None:
    """Refuse a checkpoint of another network, by the key that differs."""
    saved, here = found["esper"], module.description()
    for key, size in here["sizes"].items():
        if saved["sizes"][key] != size:
            raise ValueError(f"policy.{key}={size}: the checkpoint {path} has {saved['sizes'][key]}.")
    for key, value in here["layout"].items():
        if saved["layout"][key] != value:
            raise ValueError(f"{key}: this run has {value}, but the checkpoint {path} {saved['layout'][key]}.")


def restore(module: PPO, path: Path) -> dict[str, Any]:
    """Bring a module to where a checkpoint was saved; what callbacks have saved is given back."""
    found = read_checkpoint(path)
    fits(found, module, path)
    module.load_state_dict(found["state_dict"])
    module.optimizer_state = found["optimizer_states"][0]
    module.counters = Counters(**found["esper"]["counters"])
    module.earlier = found["esper"].get("earlier") or {}
    torch.set_rng_state(found["esper"]["generator"])
    callbacks: dict[str, Any] = found.get("callbacks", {})
    del found  # the weights are in the module now
    return callbacks


class Checkpoints(Callback):
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
        value = None if self._metric is None else pl_module.latest.get(self._metric)
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
