"""Class-balanced splits and shuffled indices, from fixed random seeds."""

import torch
from torch import Tensor

from esper.data.store import DataError
from esper.rng import make_generator


def stratified_split(
    labels: Tensor, first: int, second: int | None, *, classes: int, rng_seed: int, keys: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Two disjoint, class-balanced sets of indices into `labels` [n], of sizes `first` and `second`.

    `second` None takes all remaining samples. Each class has one shuffled order; the first set comes from its start and
    the second from its end, so that the size of one set does not change the other. `keys` are the configuration keys of
    the two sizes, for messages.
    """
    order = torch.randperm(len(labels), generator=make_generator("split", rng_seed))
    by_class = [order[labels[order] == index] for index in range(classes)]
    smallest = min(len(members) for members in by_class)
    front = _class_sizes(first, classes)
    if second is None:
        back = [len(members) - size for members, size in zip(by_class, front, strict=True)]
    else:
        back = _class_sizes(second, classes)
    for key, size, class_sizes in ((keys[0], first, front), (keys[1], second, back)):
        if size is not None and (size < 1 or max(class_sizes) > smallest):
            raise DataError(f"{key}={size}: must be between 1 and {smallest * classes:,} so that classes are balanced.")
    if max(a + b for a, b in zip(front, back, strict=True)) > smallest:
        raise DataError(f"{keys[0]}={first}, {keys[1]}={second}: together must be at most {smallest * classes:,}.")
    first_set = [members[:size] for members, size in zip(by_class, front, strict=True)]
    second_set = [members[len(members) - size :] for members, size in zip(by_class, back, strict=True)]
    return torch.cat(first_set).sort().values, torch.cat(second_set).sort().values


def interleave_classes(labels: Tensor) -> Tensor:
    """An order of `labels` [n] in which every part from the start has all classes equally often, up to one sample."""
    by_class = labels.argsort(stable=True)
    counts = torch.bincount(labels)
    rank = torch.empty_like(labels)  # of each sample in its class
    rank[by_class] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]
    return (rank * len(counts) + labels).argsort()


def _class_sizes(size: int, classes: int) -> list[int]:
    """`size` divided among the classes as evenly as possible."""
    return [size // classes + (index < size % classes) for index in range(classes)]


class Shuffle:
    """An endless stream of indices: one random permutation of all samples after another."""

    def __init__(self, size: int, batch: int, generator: torch.Generator | None, device: torch.device) -> None:
        if not 1 <= batch <= size:
            raise DataError(f"batch={batch}: must be between 1 and the {size:,} samples of the training split.")
        self._size, self._batch, self._generator, self._device = size, batch, generator, device
        self._remaining = torch.empty(0, dtype=torch.int64, device=device)

    def take(self) -> Tensor:
        """The next [batch] indices."""
        if len(self._remaining) < self._batch:
            order = torch.randperm(self._size, generator=self._generator, device=self._device)
            self._remaining = torch.cat([self._remaining, order])
        batch, self._remaining = self._remaining[: self._batch], self._remaining[self._batch :]
        return batch
