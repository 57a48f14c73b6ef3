"""Copies of the network that other callbacks keep, such as for averages of weights: they must grow with it."""

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper.grow.additions import copy_structure
from esper.growth import find_hooked_slots


def grow_copies(trainer: Trainer, module: LightningModule) -> None:
    """Give the copies the slots and seeds of the network."""
    for copy in network_copies(trainer, module):
        copy_structure(module, copy)


@torch.no_grad()
def restart_copies(trainer: Trainer, module: LightningModule) -> None:
    """Set the copies to the weights of the network, because theirs may be non-finite."""
    for copy in network_copies(trainer, module):
        copy.load_state_dict(module.state_dict())


def align_copies(trainer: Trainer, module: LightningModule) -> None:
    """Give the seeds of the copies the alphas of the network's: an alpha is not a weight to be averaged."""
    slots = find_hooked_slots(module)
    for copy in network_copies(trainer, module):
        for name, slot in find_hooked_slots(copy).items():
            slot.set(slots[name].mode, slots[name].alpha.item())


def network_copies(trainer: Trainer, module: LightningModule) -> Iterator[nn.Module]:
    """The copies of a network that the callbacks of a Trainer have."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set in Lightning's connector
        for value in list(vars(callback).values()):
            held = value.module if isinstance(value, AveragedModel) else value
            if held is not module and isinstance(held, type(module)):
                yield held
