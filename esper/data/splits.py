"""Which samples go where: splits that are balanced over classes and follow from a fixed seed."""

import torch
from torch import Tensor

from esper.data.store import DataError
from esper.rng import make_generator


def stratified(
    labels: Tensor, first: int, second: int | None, *, classes: int, rng_seed: int, keys: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Two disjoint, class-balanced sets of indices into `labels` [n]; a `second` of None takes all that is left.

    Both come from one shuffled order of each class, the first from its front and the second from its end, so that the
    size of one set does not change what is in the other. `keys` name the two sizes in messages.
    """
    order = torch.randperm(len(labels), generator=make_generator("split", rng_seed))
    by_class = [order[labels[order] == index] for index in range(classes)]
    smallest = min(len(members) for members in by_class)
    front = _shares(first, classes)
    back = [len(m) - f for m, f in zip(by_class, front, strict=True)] if second is None else _shares(second, classes)
    for key, size, shares in ((keys[0], first, front), (keys[1], second, back)):
        if size is not None and (size < 1 or max(shares) > smallest):
            raise DataError(f"{key}={size}: must be between 1 and {smallest * classes:,} for classes to be balanced.")
    if max(a + b for a, b in zip(front, back, strict=True)) > smallest:
        raise DataError(f"{keys[0]}={first}, {keys[1]}={second}: together they exceed {smallest * classes:,} samples.")
    in_front = [members[:share] for members, share in zip(by_class, front, strict=True)]
    in_back = [members[len(members) - share :] for members, share in zip(by_class, back, strict=True)]
    return torch.cat(in_front).sort().values, torch.cat(in_back).sort().values


def _shares(size: int, classes: int) -> list[int]:
    """`size` parted among the classes as evenly as can be."""
    return [size // classes + (index < size % classes) for index in range(classes)]


class Shuffle:
    """Indices without end: one random order of all samples after the other, drawn from a generator of one's own."""

    def __init__(self, size: int, batch: int, generator: torch.Generator | None, device: torch.device) -> None:
        if not 1 <= batch <= size:
            raise DataError(f"batch={batch}: must be between 1 and the {size:,} samples of the training split.")
        self._size, self._batch, self._generator, self._device = size, batch, generator, device
        self._left = torch.empty(0, dtype=torch.int64, device=device)

    def take(self) -> Tensor:
        """The next [batch] indices."""
        if len(self._left) < self._batch:
            fresh = torch.randperm(self._size, generator=self._generator, device=self._device)
            self._left = torch.cat([self._left, fresh])
        taken, self._left = self._left[: self._batch], self._left[self._batch :]
        return taken
