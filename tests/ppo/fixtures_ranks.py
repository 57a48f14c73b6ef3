"""A callback that saves what each rank of a distributed run has, for tests to compare."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from esper.ppo import PPO, Rollout


class RankRecorder(Callback):
    """Saves every round's episodes and statistics and, at the end, all weights; can kill its own rank.

    Arguments:
        directory: directory of the run
        killed_rank: rank that is killed; None kills none
        killed_round: round after which it is killed
    """

    def __init__(self, directory: Path, killed_rank: int | None = None, killed_round: int = 1) -> None:
        self._directory, self._killed_rank, self._killed_round = Path(directory), killed_rank, killed_round
        self._rounds: list[dict[str, Any]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Rollout, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        record = {
            "episode_seeds": batch.episode_seeds,
            "log_prob": batch.log_prob,
            "action": batch.action,
            "statistics": {name: buffer.clone() for name, buffer in pl_module.named_buffers()},
        }
        self._rounds.append(record)
        if trainer.global_rank == self._killed_rank and pl_module.counters.rounds == self._killed_round:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved = {"rounds": self._rounds, "state": pl_module.state_dict()}
        torch.save(saved, self._directory / f"rank{trainer.global_rank}.pt")
