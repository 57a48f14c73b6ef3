"""Checkpoints: plain data, written atomically, and checked against the run that loads them.

Lightning saves weights, normalisers and the optimizer's state. The entry `esper` is added to them: see
`CheckpointMetadata`.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from esper.controllers import LAST_CHECKPOINT, read_checkpoint_content
from esper.files import write_buffered
from esper.ppo.collector import StoppedError
from esper.ppo.metadata import CheckpointMetadata
from esper.ppo.module import PPO

LAST, BEST = LAST_CHECKPOINT, "best.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint as a whole or not at all: a full disk or a kill leaves the last one that was saved."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        write_buffered(Path(path), partial(torch.save, checkpoint))


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file."""

    metadata: CheckpointMetadata
    state_dict: Mapping[str, Tensor]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint with `weights_only=True`: no code in the file is executed."""
    content = read_checkpoint_content(path)
    try:
        metadata = CheckpointMetadata.from_dict(content["esper"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from None
    return Checkpoint(metadata, content["state_dict"])


class CheckpointCallback(ModelCheckpoint):
    """Saves `last.ckpt` and `best.ckpt`.

    Arguments:
        directory: directory of the checkpoints
        every: rounds between saves of `last.ckpt`; it is also saved when the run ends or is stopped
        best: metric whose highest value is saved as `best.ckpt`; None saves no best
    """

    def __init__(self, directory: str | Path, *, every: int, best: str | None) -> None:
        if every < 1:
            raise ValueError(f"callbacks.checkpoints.every={every}: must be at least 1.")
        super().__init__(
            dirpath=directory,
            filename=Path(BEST).stem,
            monitor=best,
            mode="max",
            save_top_k=0 if best is None else 1,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )
        self._every, self._last = every, Path(directory) / LAST
        self._generator = torch.get_rng_state()  # at the start of the round

    @property
    def state_key(self) -> str:
        """Without the arguments, so that a resumed run may change `every`."""
        return type(self).__qualname__

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Checkpoint directory .* not empty")  # a resumed run continues there
            super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning calls no other hook at the start of the round that a resumed run was stopped in."""
        super().on_train_start(trainer, pl_module)
        self._generator = torch.get_rng_state()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._generator = torch.get_rng_state()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save by rounds: ModelCheckpoint goes by optimizer steps, and an update may have none."""
        assert isinstance(pl_module, PPO)
        current = trainer.callback_metrics.get(self.monitor or "")
        if current is not None and self.check_monitor_top_k(trainer, current):
            self._set_best(current)
            self._save(trainer, self.best_model_path)
        if pl_module.counters.rounds % self._every == 0:
            self._save_last(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_last(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, StoppedError):
            torch.set_rng_state(self._generator)  # the resumed run collects the round again
        if isinstance(exception, StoppedError | SIGTERMException):
            self._save_last(trainer)

    def _save_last(self, trainer: Trainer) -> None:
        self._save(trainer, self._last)

    def _save(self, trainer: Trainer, path: str | Path) -> None:
        trainer.save_checkpoint(path, weights_only=False)  # optimizer and counters too

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        return current is not None and bool(current.isfinite()) and super().check_monitor_top_k(trainer, current)

    def state_dict(self) -> dict[str, Any]:
        """Without paths, so that a run's directory can be moved."""
        score = self.best_model_score
        return {"metric": self.monitor, "highest": None if score is None else float(score)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["metric"] != self.monitor or state_dict["highest"] is None:
            return
        self._set_best(torch.tensor(state_dict["highest"]))

    def _set_best(self, score: Tensor) -> None:
        self.best_model_path = self.kth_best_model_path = self.format_checkpoint_name({})
        self.best_model_score = self.kth_value = score
        self.best_k_models = {self.best_model_path: score}
