"""Several processes that train one network: they agree on results and decisions, and wrap the network anew."""

import gc
from collections.abc import Sequence
from typing import TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

Shared = TypeVar("Shared")


def mean_over_ranks(trainer: Trainer, values: Sequence[float]) -> list[float]:
    """The means of some numbers over all processes; NaN if one of them is."""
    if trainer.world_size == 1:
        return list(values)
    tensor = torch.tensor(list(values), dtype=torch.float64, device=trainer.strategy.root_device)
    means: list[float] = trainer.strategy.reduce(tensor, reduce_op="mean").tolist()
    return means


def from_first_rank(trainer: Trainer, value: Shared) -> Shared:
    """The value of the first process."""
    return value if trainer.world_size == 1 else trainer.strategy.broadcast(value)


def any_rank(trainer: Trainer, value: bool) -> bool:
    """Whether a value is true in any process."""
    return value if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(value, all=False)


def wrap_again(trainer: Trainer) -> None:
    """Wrap a network whose parameters have changed in DistributedDataParallel again; every process must call this."""
    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and isinstance(strategy.model, DistributedDataParallel):
        strategy.model = trainer.lightning_module
        gc.collect()  # the old wrapper must be gone: it would still average the gradients
        strategy.configure_ddp()
