"""How much of the learning rate a training has left."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from esper.grow.observe import NAN
from esper.grow.optimizers import SeedGroups, future_rates


class LearningRateMass:
    """The share of the learning rate's sum that is left.

    The past is what the first optimizer had. The future is what its scheduler will set, if it steps as often as until
    the first question. Without a scheduler that can be foreseen, it is the share of the training that is left.

    Arguments:
        groups: optimizers and schedulers
    """

    def __init__(self, groups: SeedGroups) -> None:
        self._groups = groups
        self._sum, self._steps = 0.0, 0
        self._total: int | None = None  # steps of the scheduler in the whole training
        groups.listeners.append(self._watch)

    def left(self, progress: float) -> float:
        """The share at some progress in [0, 1]; NaN if it cannot be known."""
        scheduler = next(iter(self._groups.schedulers), None)
        done = getattr(scheduler, "last_epoch", 0)
        if not isinstance(done, int) or done < 1 or progress <= 0 or not self._steps:
            return NAN
        if self._total is None:
            self._total = round(done / progress)
        rates = future_rates(scheduler, max(0, self._total - done))
        if rates is None:
            return NAN
        past = self._sum / self._steps * done
        return sum(rates) / max(sum(rates) + past, 1e-30)

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._sum, "steps": self._steps, "total": self._total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sum, self._steps, self._total = state["sum"], state["steps"], state["total"]

    def _watch(self, optimizer: Optimizer) -> None:
        if optimizer is self._groups.optimizers[0]:
            self._sum += float(optimizer.param_groups[0]["lr"])
            self._steps += 1
