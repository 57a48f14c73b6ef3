"""A callback that kills its own process at a given point of a run."""

import os
import signal
from collections.abc import Sequence

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from esper.ppo import PPO, Rollout


class KillPoint(Callback):
    """Sends SIGKILL to its own process.

    Arguments:
        point: `training` or `sampled`, the second step of a round of that kind; `checkpoint`, the first checkpoint that
            is written, before it replaces the old one; `never`
        done: rounds that are done at that point
    """

    def __init__(self, point: str, done: int) -> None:
        self._point, self._done = point, done
        self.episode_buffer = self  # a run makes it a RoundListener

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        assert isinstance(pl_module, PPO)
        self._module = pl_module
        if self._point == "checkpoint":
            os.fsync = lambda descriptor: self._kill()  # called when the temporary file is written

    def on_round_start(self, kind: str, episode_seeds: Sequence[int], steps: int) -> None:
        self._kind, self._step = kind, 0

    def on_step(self, action: Tensor, step: object) -> None:
        self._step += 1
        if self._kind == self._point and self._step == 2:
            self._kill()

    def on_round_end(self, rollout: Rollout) -> None: ...

    def _kill(self) -> None:
        if self._module.counters.rounds == self._done:
            os.kill(os.getpid(), signal.SIGKILL)
