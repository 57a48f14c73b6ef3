"""Data on the device: CIFAR-10, TinyStories and synthetic stand-ins, in three splits, as streams of batches."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from esper.data.images import ImageData, ImageOptions, Labelled
from esper.data.store import DataError
from esper.data.text import TextData


class Stream(Protocol):
    """Training batches without end."""

    def next(self) -> tuple[Tensor, Tensor]: ...


class Data(Protocol):
    """What a host is trained, validated and tested on. Splits are called train, validation and test."""

    name: str
    kind: str  # images or text
    device: torch.device

    @property
    def options(self) -> int:
        """How many answers a host chooses from: classes or tokens."""

    def score(self, split: str, loss: Tensor, accuracy: Tensor) -> Tensor:
        """What counts, more is better, from a mean loss and a share of right answers over a split; any shape."""

    def size(self, split: str) -> int: ...

    def stream(self, batch: int, generator: torch.Generator | None) -> Stream: ...

    def preparation(self) -> dict[str, Any]:
        """How a host's inputs are made, as plain data, for whoever takes a network home."""

    def batches(self, split: str, batch: int) -> Iterator[tuple[Tensor, Tensor]]: ...


__all__ = [
    "Data",
    "DataError",
    "ImageData",
    "ImageOptions",
    "Labelled",
    "Stream",
    "TextData",
]
