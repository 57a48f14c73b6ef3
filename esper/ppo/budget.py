"""The end of a run by its budget of decisions."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from esper.ppo.distributed import world_size
from esper.ppo.module import PPO


class DecisionBudget(Callback):
    """Ends a run before a round that might exceed its budget.

    Arguments:
        budget: maximum number of decisions of the whole run
        round_decisions: maximum number of decisions of a round, of one rank
    """

    def __init__(self, budget: int, *, round_decisions: int) -> None:
        if budget < round_decisions:
            raise ValueError(f"decisions={budget}: must be at least {round_decisions:,}, the decisions of one round.")
        self._budget, self._round_decisions = budget, round_decisions

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A resumed run may have no round left."""
        self._check(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._check(trainer, pl_module)

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, PPO)
        if module.counters.decisions + self._round_decisions * world_size() > self._budget:
            trainer.should_stop = True
