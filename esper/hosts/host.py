"""What every host is: segments in order, with slots between them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from esper.flops import Flops


@dataclass(frozen=True)
class Slot:
    """A place between two segments where a seed can live."""

    name: str
    channels: int


class Host(nn.Module):
    """A network cut into segments. Segment i ends at slot i; the last one ends at the output.

    A host knows nothing of seeds. It can be run from its input or from any slot, to any later slot or to the output,
    and running it in pieces gives bit for bit what running it whole does. A subclass names the `topology` of
    blueprints that fit its features, and hands its segments and slots to the constructor.
    """

    topology: ClassVar[str]

    def __init__(self, segments: Sequence[nn.Module], slots: Sequence[Slot]) -> None:
        super().__init__()
        if len(segments) != len(slots) + 1:
            raise ValueError(
                f"{type(self).__name__}: {len(slots)} slots part {len(slots) + 1} segments, not {len(segments)}."
            )
        self.segments = nn.ModuleList(segments)
        self.slots: tuple[Slot, ...] = tuple(slots)
        self._order: dict[str, int] = {slot.name: index + 1 for index, slot in enumerate(self.slots)}

    def run(self, x: Tensor, start: str | None = None, stop: str | None = None) -> Tensor:
        """The features at slot `stop`, or the output if None, from the input, or from the features at slot `start`."""
        first = 0 if start is None else self._position(start)
        last = len(self.segments) if stop is None else self._position(stop)
        if last < first:
            raise ValueError(f"slot {stop} lies before slot {start}; a host runs forwards only.")
        for segment in self.segments[first:last]:
            x = segment(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def flops(self, shape: Sequence[int]) -> list[Flops] | None:
        """The cost of each segment for one sample of that shape; None leaves it open, and it is counted."""
        return None

    def slot(self, name: str) -> Slot:
        return self.slots[self._position(name) - 1]

    def use_generator(self, generator: torch.Generator | None) -> None:
        """Draw dropout from `generator`, so that a host's noise is its own; None is torch's global generator."""
        for module in self.modules():
            if isinstance(module, Dropout):
                module.generator = generator

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Runs inside take no dropout and draw from no generator."""
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
    """Dropout that draws from a generator of its own."""

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
    """Refuse a host with a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"host.{name}={size}: must be at least 1.")


def count_parameters(module: nn.Module) -> int:
    """Every parameter once, also where modules share it."""
    return sum(parameter.numel() for parameter in module.parameters())
