"""What a LightningModule logs: the names of its results, and the mean of its training loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from esper.grow.observe import NAN

LOSS_NAMES = ("val_loss", "val/loss", "valid_loss", "validation_loss", "valid/loss", "loss/val", "eval_loss")
LOWER_IS_BETTER = ("loss", "error", "perplexity", "ppl", "mae", "mse", "rmse", "nll", "wer", "cer")


@dataclass(frozen=True)
class ResultNames:
    """The names under which results are logged."""

    loss: str
    score: str | None


class LoggedNames:
    """Finds the validation loss and the score among what is logged.

    Arguments:
        val_loss: name of the loss; None is the first of LOSS_NAMES, or `monitor` if that is a loss
        monitor: name of the score; None is the loss
        mode: whether a higher score is better; None follows from its name
    """

    def __init__(self, val_loss: str | None, monitor: str | None, mode: Literal["max", "min"] | None) -> None:
        self._loss, self._score = val_loss, monitor
        parts = "" if monitor is None else monitor.lower().replace("/", "_")
        is_lower_better = any(part in LOWER_IS_BETTER for part in parts.split("_"))
        self.mode: str = mode or ("min" if is_lower_better else "max")

    def resolve(self, logged: Mapping[str, Any]) -> ResultNames:
        """The names; refuses what is not logged."""
        for key, name in (("monitor", self._score), ("val_loss", self._loss)):
            if name is not None and name not in logged:
                raise ValueError(f"{key}={name}: must be logged by the validation; logged are {_listed(logged)}.")
        loss = self._loss or next((name for name in LOSS_NAMES if name in logged), None)
        if loss is None and self._score is not None and self.mode == "min" and "loss" in self._score.lower():
            loss = self._score
        if loss is None:
            raise ValueError(
                f"val_loss=None: must name the validation loss, or one of {', '.join(LOSS_NAMES)} must be logged; "
                f"logged are {_listed(logged)}."
            )
        return ResultNames(loss, None if self._score == loss else self._score)


class RunningLoss:
    """The mean training loss since the last validation; it stays on the device until it is read."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self.count = 0

    def add(self, loss: Tensor) -> None:
        value = loss.detach().double() if loss.device.type == "cpu" else loss.detach().float()
        self._sum = value if self._sum is None else self._sum + value
        self.count += 1

    def mean(self) -> float:
        """NaN before the first batch."""
        return NAN if self._sum is None else float(self._sum) / self.count

    def state_dict(self) -> dict[str, Any]:
        return {"sum": None if self._sum is None else float(self._sum), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sum = None if state["sum"] is None else torch.tensor(state["sum"], dtype=torch.float64)
        self.count = state["count"]


def _listed(logged: Mapping[str, Any]) -> str:
    return ", ".join(sorted(logged)) or "none"
