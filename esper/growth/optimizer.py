"""One optimizer for a host and its seeds, with a parameter group for each seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from esper.growth.gradients import FlatGradients
from esper.growth.model import GrowingHost

HOST_GROUP = "host"  # the owner of the host's parameter groups; a seed's owner is its slot

WSD_DECAY = 0.3  # share of the episode: long enough to reach the loss of a cosine, and the plateau stays long
FIRST_WARMUP = 0.05  # lowest factor of a new seed's warm-up: at 0, its first batch would be wasted


@dataclass(frozen=True)
class DecayShape:
    """A decay from 1 at time 0 down to 0 at time 1."""

    value: Callable[[float], float]
    integral: Callable[[float], float]  # of `value` from 0 to a time
    span: float = 1.0  # share of the episode that it takes, at its end; before it, the factor is 1


SHAPES: dict[str, DecayShape] = {
    "constant": DecayShape(lambda t: 1.0, lambda t: t),
    "linear": DecayShape(lambda t: 1 - t, lambda t: t - t * t / 2),
    "cosine": DecayShape(
        lambda t: (1 + math.cos(math.pi * t)) / 2, lambda t: (t + math.sin(math.pi * t) / math.pi) / 2
    ),
    "wsd": DecayShape(lambda t: 1 - t, lambda t: t - t * t / 2, span=WSD_DECAY),
}


class LRSchedule:
    """A factor of the learning rates over an episode.

    Arguments:
        shape: decay after the warm-up: constant, linear, cosine, or wsd (a plateau, then a linear decay in the last
            30% of the episode)
        warmup: share of the episode in which the factor rises from 0 to 1
        final: factor at the end of the episode
    """

    def __init__(self, *, shape: Literal["constant", "linear", "cosine", "wsd"], warmup: float, final: float) -> None:
        for key, value in (("warmup", warmup), ("final", final)):
            if not 0 <= value < 1:
                raise ValueError(f"optimizer.schedule.{key}={value}: must be at least 0 and below 1.")
        self._decay, self._warmup, self._final = SHAPES[shape], warmup, final
        self._start = max(warmup, 1 - self._decay.span)  # progress at which the decay starts
        self._mass = self._integral(1.0)

    def __call__(self, progress: float) -> float:
        """The factor at `progress` in [0, 1]."""
        if progress < self._warmup:
            return progress / self._warmup
        return self._final + (1 - self._final) * self._decay.value(self._decay_time(progress))

    def mass_left(self, progress: float) -> float:
        """The share of the integral of the factor over the episode that is left from `progress` in [0, 1] on."""
        return 1 - self._integral(min(max(progress, 0.0), 1.0)) / self._mass

    def _decay_time(self, progress: float) -> float:
        return min(max(progress - self._start, 0.0) / (1 - self._start), 1.0)

    def _integral(self, progress: float) -> float:
        """The integral of the factor from 0 to `progress`."""
        if progress < self._warmup:
            return progress * progress / self._warmup / 2
        plateau = min(progress, self._start) - self._warmup
        decay = self._final * max(progress - self._start, 0.0)
        decay += (1 - self._final) * (1 - self._start) * self._decay.integral(self._decay_time(progress))
        return self._warmup / 2 + plateau + decay


class GrowthOptimizer:
    """Optimizer of a growing host. Adding or removing a seed does not change the state of other parameters.

    Arguments:
        model: the growing host; its present seeds are included
        build: builds the torch optimizer from parameter groups
        seed_lr: learning rate of seeds, before the schedule
        seed_weight_decay: weight decay of seeds
        clip: maximum gradient norm, of the host and of each seed separately, so that one does not reduce the steps of
            the others; None is no limit
        schedule: factor of all learning rates, from the progress of the episode in [0, 1]
        seed_warmup: share of the episode in which the learning rate of a new seed rises to that of the schedule, from
            the first step that trains it; a seed that is added before the first step has the schedule's warm-up only
        lr_scale: factor of all learning rates
    """

    def __init__(
        self,
        model: GrowingHost,
        *,
        build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        seed_lr: float,
        seed_weight_decay: float,
        clip: float | None,
        schedule: Callable[[float], float],
        seed_warmup: float = 0.0,
        lr_scale: float = 1.0,
    ) -> None:
        if not 0 <= seed_warmup < 1:
            raise ValueError(f"optimizer.seed_warmup={seed_warmup}: must be at least 0 and below 1.")
        if not 0 < lr_scale < math.inf:
            raise ValueError(f"lr_scale={lr_scale}: must be above 0 and finite.")
        self._model = model
        matrices = [parameter for parameter in model.host.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in model.host.parameters() if parameter.ndim <= 1]  # norms and biases
        self.torch = build(
            [{"params": matrices, "owner": HOST_GROUP}, {"params": vectors, "owner": HOST_GROUP, "weight_decay": 0.0}]
        )
        self._seed_options = {"lr": seed_lr, "weight_decay": seed_weight_decay}
        self.clip = math.inf if clip is None else clip
        self._schedule, self._seed_warmup, self._lr_scale = schedule, seed_warmup, lr_scale
        self._has_stepped = False
        self.seed_starts: dict[str, float | None] = {}  # progress at a seed's first training; None before it
        self._base_lr: dict[str, float] = {HOST_GROUP: self.torch.param_groups[0]["lr"]}
        self._parameters: dict[str, list[nn.Parameter]] = {HOST_GROUP: matrices + vectors}
        self._gradients: FlatGradients | None = None
        for slot in model.seeds:
            self.add(slot)

    def add(self, slot: str) -> None:
        """Add the parameters of a new seed."""
        parameters = list(self._model.seeds[slot].parameters())
        self.torch.add_param_group({"params": parameters, "owner": slot, **self._seed_options})
        self._base_lr[slot], self._parameters[slot] = self._seed_options["lr"], parameters
        self.seed_starts[slot] = None if self._has_stepped else -math.inf  # -inf: no warm-up of its own

    def remove(self, slot: str) -> None:
        """Remove the parameters of a seed and their state."""
        for parameter in self.parameters(slot):
            self.torch.state.pop(parameter, None)
        self.torch.param_groups[:] = [group for group in self.torch.param_groups if group["owner"] != slot]
        del self._base_lr[slot], self._parameters[slot], self.seed_starts[slot]

    @property
    def owners(self) -> tuple[str, ...]:
        """HOST_GROUP, then the slot of each seed."""
        return tuple(self._base_lr)

    def parameters(self, owner: str) -> list[nn.Parameter]:
        """The parameters of the host or of one seed."""
        return self._parameters[owner]

    def zero_grad(self) -> None:
        """Remove all gradients and their buffer."""
        self.torch.zero_grad(set_to_none=True)
        self._gradients = None

    def step(
        self,
        progress: float,
        scaler: torch.amp.GradScaler | None = None,
        watch: Callable[[], None] | None = None,
        *,
        keep_buffer: bool = False,
    ) -> dict[str, Tensor]:
        """Clip, step and zero the gradients; returns each owner's gradient norm before clipping, on its device.

        With a scaler, the order is: unscale, watch, clip, step, update. A seed's non-finite gradients are set to zero
        first, so that they do not make the scaler skip the host's step. `watch` is called before the gradients are
        clipped. A parameter without a gradient does not change. `keep_buffer` saves time if the next backward pass
        reaches the same parameters: they keep the memory of their gradients, set to zero, and one that it does not
        reach has a gradient of zero.
        """
        if self._gradients is None or not self._gradients.is_complete:
            self._gradients = FlatGradients(self._parameters)
            self._add_momentum()
        if scaler is not None:
            for owner in self.owners[1:]:
                for values in self._gradients.of(owner):
                    values.nan_to_num_(0.0, 0.0, 0.0)
            scaler.unscale_(self.torch)
        if watch is not None:
            watch()
        norms = self._gradients.clip(self.clip)
        self._set_learning_rates(progress)
        if scaler is None:
            self.torch.step()
        else:
            scaler.step(self.torch)
            scaler.update()
        if keep_buffer:
            self._gradients.zero()
        else:
            self.zero_grad()
        return norms

    def _set_learning_rates(self, progress: float) -> None:
        self._has_stepped = True
        factor = self._schedule(progress) * self._lr_scale
        for group in self.torch.param_groups:
            owner = group["owner"]
            group["lr"] = self._base_lr[owner] * factor
            if owner != HOST_GROUP and self._seed_warmup:
                group["lr"] *= self._seed_factor(owner, progress)

    def _seed_factor(self, slot: str, progress: float) -> float:
        """The factor of a seed's learning rate by its own warm-up."""
        start = self.seed_starts[slot]
        if start is None:
            if all(parameter.grad is None for parameter in self._parameters[slot]):
                return 1.0  # this step does not train it
            start = self.seed_starts[slot] = progress
        return min(1.0, max(FIRST_WARMUP, (progress - start) / self._seed_warmup))

    def _add_momentum(self) -> None:
        """Set missing momentum to zero: torch's fused SGD does not initialise it in a step that a scaler skips."""
        if not isinstance(self.torch, torch.optim.SGD):
            return
        for group in self.torch.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                if parameter.grad is not None and self.torch.state[parameter].get("momentum_buffer") is None:
                    self.torch.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
