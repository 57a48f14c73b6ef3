"""Reductions over the ranks of a distributed run; in a single process they return their argument."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

# NCCL and the store raise a DistError, but gloo (in torch 2.13) a plain RuntimeError that only its text identifies
GLOO_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")


class RankLostError(RuntimeError):
    """Another process of a distributed run has ended."""


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def detect_lost_rank() -> Iterator[None]:
    """Raise a RankLostError for a communication error inside that is due to another rank's end."""
    try:
        yield
    except RuntimeError as error:
        if world_size() > 1 and (isinstance(error, dist.DistError) or any(text in str(error) for text in GLOO_LOST)):
            raise RankLostError("another process of this run has ended, so this one ends too") from error
        raise


def reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks, returned on each rank."""
    if world_size() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total


def reduce_max(values: Tensor) -> Tensor:
    """The element-wise maximum over all ranks, returned on each rank."""
    if world_size() == 1:
        return values
    largest = values.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def gather_ranks(values: Tensor) -> Tensor:
    """The values of all ranks, concatenated along the first axis; each rank must have the same shape."""
    if world_size() == 1:
        return values
    parts = [torch.empty_like(values) for _ in range(world_size())]
    dist.all_gather(parts, values.detach().contiguous())
    return torch.cat(parts)


def reduce_mean(values: Tensor) -> Tensor:
    """The mean over all ranks, returned on each rank.

    Divide a rank's summed loss by the mean of the ranks' counts: once gradients are averaged over ranks, the loss is
    the mean over the elements of all ranks.
    """
    return reduce_sum(values) / world_size()
