"""What all ranks of a distributed run must hold alike; on a single process everything is as it is."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "communicator was aborted", "Timed out")


class RankLostError(RuntimeError):
    """Another process of a distributed run is gone."""


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def detect_lost_rank() -> Iterator[None]:
    """What goes wrong inside because another rank is gone is told as that."""
    try:
        yield
    except RuntimeError as error:
        if world_size() > 1 and any(sign in str(error) for sign in LOST):
            raise RankLostError("another process of this run is gone, so it ends here") from error
        raise


def reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks, on each of them."""
    if world_size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def reduce_max(values: Tensor) -> Tensor:
    """The largest over all ranks, element by element."""
    if world_size() == 1:
        return values
    most = values.detach().clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most


def reduce_mean(values: Tensor) -> Tensor:
    """The sum over all ranks divided by their number.

    A loss summed here and divided by this share of a count becomes, once gradients are averaged over ranks, the mean
    over everything that was counted anywhere.
    """
    return reduce_sum(values) / world_size()
