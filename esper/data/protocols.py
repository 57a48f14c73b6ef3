"""What hosts need of a data set."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """An endless stream of training batches."""

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the next batch."""


class Data(Protocol):
    """A data set for training, validation and test of a host. Its splits are train, validation and test."""

    name: str
    kind: str  # images or text
    device: torch.device

    @property
    def options(self) -> int:
        """Size of a host's output: number of classes or tokens."""

    def score(self, split: str, loss: Tensor, accuracy: Tensor) -> Tensor:
        """The score, higher is better, from the mean loss and the accuracy (a share) of a split; any shape."""

    def size(self, split: str) -> int:
        """Number of samples."""

    def stream(self, batch: int, generator: torch.Generator | None) -> Stream:
        """Endless training batches, drawn with `generator`."""

    def preparation(self) -> dict[str, Any]:
        """How inputs are prepared, as plain data, for users of an exported network."""

    def batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over a split in a fixed order."""
