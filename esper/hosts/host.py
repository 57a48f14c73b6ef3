"""The base class of hosts: segments in order, with slots between them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from esper.flops import Flops


@dataclass(frozen=True)
class Slot:
    """A place between two segments for one seed."""

    name: str
    channels: int


class Host(nn.Module):
    """A network of consecutive segments. Segment i ends at slot i; the last segment ends at the output.

    A host does not depend on seeds. It runs from its input or from any slot, to any later slot or to the output, and
    running it in parts is bit-equal to running it at once. A subclass sets `topology`, the kind of blueprints that fit
    its features, and passes its segments and slots to the constructor.

    Arguments:
        segments: modules that run one after another; one more than slots
        slots: the slot after each segment but the last
    """

    topology: ClassVar[str]

    def __init__(self, segments: Sequence[nn.Module], slots: Sequence[Slot]) -> None:
        super().__init__()
        if len(segments) != len(slots) + 1:
            raise ValueError(
                f"{type(self).__name__}: {len(slots)} slots need {len(slots) + 1} segments, not {len(segments)}."
            )
        self.segments = nn.ModuleList(segments)
        self.slots: tuple[Slot, ...] = tuple(slots)
        self._order: dict[str, int] = {slot.name: index + 1 for index, slot in enumerate(self.slots)}

    def run(self, x: Tensor, start: str | None = None, stop: str | None = None) -> Tensor:
        """Run from the input, or from the features at slot `start`, to slot `stop`, or to the output if None."""
        first = 0 if start is None else self._position(start)
        last = len(self.segments) if stop is None else self._position(stop)
        if last < first:
            raise ValueError(f"stop={stop}: must not be before start={start}.")
        for segment in self.segments[first:last]:
            x = segment(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def flops(self, shape: Sequence[int]) -> list[Flops] | None:
        """FLOPs of each segment for one sample of a shape; None measures them instead."""
        return None

    @classmethod
    def variant_arguments(cls, arguments: Mapping[str, Any], *, width: float, depth: int) -> dict[str, Any] | None:
        """Keyword arguments of a plainly wider and deeper host with the same slots; None if this class has no variants.

        Arguments:
            arguments: keyword arguments of the host
            width: factor of its channels, at least 1
            depth: number of further layers, in a unit of the class
        """
        return None

    def slot(self, name: str) -> Slot:
        """The slot of that name; raises ValueError if the host has none."""
        return self.slots[self._position(name) - 1]

    def use_generator(self, generator: torch.Generator | None) -> None:
        """Draw dropout from `generator`, so that it is independent of other hosts; None is torch's global generator."""
        for module in self.modules():
            if isinstance(module, Dropout):
                module.generator = generator

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Context without dropout: nothing is drawn from a generator."""
        active = [module for module in self.modules() if isinstance(module, Dropout) and module.training]
        for module in active:
            module.eval()
        try:
            yield
        finally:
            for module in active:
                module.train()

    def _position(self, name: str) -> int:
        if name not in self._order:
            raise ValueError(f"slot={name}: {type(self).__name__} has no such slot; it has {', '.join(self._order)}.")
        return self._order[name]


class Dropout(nn.Module):
    """Dropout that draws from `generator`; None is torch's global generator."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        if not 0 <= probability < 1:
            raise ValueError(f"host.dropout={probability}: must be at least 0 and below 1.")
        self.probability = probability
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return x
        keep = 1 - self.probability
        return x * torch.empty_like(x).bernoulli_(keep, generator=self.generator).div_(keep)


def require_positive(**sizes: int) -> None:
    """Raise ValueError for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"host.{name}={size}: must be at least 1.")


def round_half_up(value: float) -> int:
    """The nearest whole number; Python's round() rounds 4.5 down."""
    return math.floor(value + 0.5)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters; shared parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())
