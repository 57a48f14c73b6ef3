"""What each rank of a distributed run has, written down for a test to compare."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from esper.ppo import PPO, Rollout


class Witness(Callback):
    """Saves every round's episodes and statistics and, at the end, all weights; may end its own rank like a crash.

    Arguments:
        directory: of the run
        dies: rank that is killed in round `at`; None is none
    """

    def __init__(self, directory: Path, dies: int | None = None, at: int = 1) -> None:
        self._directory, self._dies, self._at = Path(directory), dies, at
        self._rounds: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Rollout, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        statistics = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
        seen = {
            "seeds": batch.episode_seeds,
            "log_prob": batch.log_prob,
            "action": batch.action,
            "statistics": statistics,
        }
        self._rounds.append(seen)
        if trainer.global_rank == self._dies and pl_module.counters.rounds == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = {"rounds": self._rounds, "state": pl_module.state_dict()}
        torch.save(found, self._directory / f"rank{trainer.global_rank}.pt")
