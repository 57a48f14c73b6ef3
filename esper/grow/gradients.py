"""Norms and health of gradients, read after every few optimizer steps."""

import math

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.grow.optimizers import SeedGroups
from esper.growth import gradient_health

STRIDE = 16  # optimizer steps between readings: they cost less than a percent of the training


class GradientWatch:
    """Reads gradients of the network, and of each seed, while the user trains. Values stay on the device.

    Arguments:
        groups: the parameters by owner
    """

    def __init__(self, groups: SeedGroups) -> None:
        self._groups = groups
        self._steps = 0
        self._norms: dict[str | None, list[Tensor]] = {}
        self._health: dict[str | None, Tensor] = {}
        groups.listeners.append(self._watch)

    def read(self) -> tuple[dict[str | None, float], dict[str | None, float]]:
        """Mean norm and lowest health since the last call, by slot; None is the network without seeds."""
        norms = {owner: float(torch.stack(values).mean()) for owner, values in self._norms.items()}
        health = {owner: float(value) for owner, value in self._health.items()}
        self._norms, self._health, self._steps = {}, {}, 0
        return norms, {owner: value for owner, value in health.items() if not math.isnan(value)}

    def _watch(self, optimizer: Optimizer) -> None:
        is_due = self._steps % STRIDE == 0
        if optimizer is self._groups.optimizers[-1]:
            self._steps += 1
        if not is_due:
            return
        for owner, parameters in self._groups.owned(optimizer).items():
            self._record(owner, parameters)

    @torch.no_grad()
    def _record(self, owner: str | None, parameters: list[nn.Parameter]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None and not p.grad.is_sparse]
        if not gradients:
            return
        norms = torch.stack([torch.linalg.vector_norm(gradient).float() for gradient in gradients])
        self._norms.setdefault(owner, []).append(torch.linalg.vector_norm(norms))
        latest = gradient_health(parameters, math.inf)
        self._health[owner] = torch.minimum(self._health.get(owner, latest), latest)
