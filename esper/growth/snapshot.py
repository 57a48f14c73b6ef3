"""Snapshots of a growing host and its optimizer, to restore later."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from esper.growth.model import GrowingHost
from esper.growth.optimizer import GrowthOptimizer
from esper.lifecycle import Blend

Value = TypeVar("Value")


@dataclass(frozen=True)
class Snapshot:
    """Plain data that shares no memory with the model."""

    seeds: dict[str, tuple[str, int]]  # slot -> blueprint, blend
    weights: dict[str, Tensor]  # parameters and buffers by name
    optimizer: dict[str, dict[str, Tensor]]  # parameter's name -> its optimizer state
    seed_starts: dict[str, float | None]  # slot -> progress at its first training, from which its warm-up counts


def snapshot(model: GrowingHost, optimizer: GrowthOptimizer, slots: Collection[str] | None = None) -> Snapshot:
    """Copy host, seeds and optimizer state to the CPU. Only the seeds in `slots` are copied; None is all."""
    included = [slot for slot in model.seeds if slots is None or slot in slots]
    excluded = tuple(f"seeds.{slot}." for slot in model.seeds if slot not in included)
    return Snapshot(
        seeds={slot: (model.seed(slot).blueprint, int(model.seed(slot).blend)) for slot in included},
        weights={name: _copy(value) for name, value in model.state_dict().items() if not name.startswith(excluded)},
        optimizer=copy_optimizer_state(
            {name: p for name, p in model.named_parameters() if not name.startswith(excluded)}, optimizer.torch
        ),
        seed_starts={slot: optimizer.seed_starts[slot] for slot in included},
    )


def adopt(saved: Snapshot, newer: Snapshot, slots: Collection[str]) -> Snapshot:
    """The snapshot `saved`, with the seeds in `slots` replaced by those of `newer`."""
    prefixes = tuple(f"seeds.{slot}." for slot in slots)

    def select(values: dict[str, Value]) -> dict[str, Value]:
        return {name: value for name, value in values.items() if name.startswith(prefixes)}

    return Snapshot(
        seeds={**saved.seeds, **{slot: newer.seeds[slot] for slot in slots}},
        weights={**saved.weights, **select(newer.weights)},
        optimizer={**saved.optimizer, **select(newer.optimizer)},
        seed_starts={**saved.seed_starts, **{slot: newer.seed_starts[slot] for slot in slots}},
    )


def restore(saved: Snapshot, model: GrowingHost, optimizer: GrowthOptimizer) -> None:
    """Restore a model and its optimizer from a snapshot; adds and removes seeds to match it. Main thread only."""
    for slot in list(model.seeds):
        if saved.seeds.get(slot) != (model.seed(slot).blueprint, int(model.seed(slot).blend)):
            optimizer.remove(slot)
            model.remove(slot)
    for slot, (blueprint, blend) in saved.seeds.items():
        if slot not in model.seeds:
            model.graft(slot, blueprint, Blend(blend), rng_seed=0)  # its weights are loaded next
            optimizer.add(slot)
    optimizer.seed_starts.update(saved.seed_starts)
    model.load_state_dict(saved.weights)
    restore_optimizer_state(saved.optimizer, dict(model.named_parameters()), optimizer.torch)


def copy_optimizer_state(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Any]]:
    """A copy of an optimizer's state on the CPU, by the name of the parameter."""
    return {
        name: {key: _copy(value) if isinstance(value, Tensor) else value for key, value in optimizer.state[p].items()}
        for name, p in parameters.items()
        if p in optimizer.state
    }


def restore_optimizer_state(
    saved: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Set the state of an optimizer's parameters to a copy; a parameter that the copy lacks has no state."""
    names = {parameter: name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        step_on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            state = saved.get(names.get(parameter, ""))
            if state is not None:
                optimizer.state[parameter] = {
                    key: value.to(_state_device(key, parameter, step_on_device), copy=True)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in state.items()
                }


def _state_device(key: str, parameter: nn.Parameter, step_on_device: bool) -> torch.device:
    """torch stores an optimizer's step count on the CPU unless its kernels read it."""
    return torch.device("cpu") if key == "step" and not step_on_device else parameter.device


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
