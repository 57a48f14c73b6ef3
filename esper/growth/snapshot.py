"""A copy of a growing host and its optimizer, to go back to."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from esper.growth.model import GrowingHost
from esper.growth.optimizer import GrowthOptimizer
from esper.lifecycle import Blend

T = TypeVar("T")


@dataclass(frozen=True)
class Snapshot:
    """Plain data that shares no memory with what it was taken from."""

    seeds: dict[str, tuple[str, int]]  # slot -> blueprint, blend
    weights: dict[str, Tensor]  # parameters and buffers by name
    optimizer: dict[str, dict[str, Tensor]]  # parameter's name -> its optimizer state


def snapshot(model: GrowingHost, optimizer: GrowthOptimizer, keep: Collection[str] | None = None) -> Snapshot:
    """Copy host, seeds and optimizer state to the CPU. `keep` names the slots whose seeds are copied; None is all."""
    slots = [slot for slot in model.seeds if keep is None or slot in keep]
    dropped = tuple(f"seeds.{slot}." for slot in model.seeds if slot not in slots)
    return Snapshot(
        seeds={slot: (model.seed(slot).blueprint, int(model.seed(slot).blend)) for slot in slots},
        weights={name: _copy(value) for name, value in model.state_dict().items() if not name.startswith(dropped)},
        optimizer={
            name: {key: _copy(value) for key, value in optimizer.torch.state[parameter].items()}
            for name, parameter in model.named_parameters()
            if parameter in optimizer.torch.state and not name.startswith(dropped)
        },
    )


def adopt(saved: Snapshot, newer: Snapshot, slots: Collection[str]) -> Snapshot:
    """A snapshot with the seeds in `slots` as a newer one has them, and all else as it was."""
    prefixes = tuple(f"seeds.{slot}." for slot in slots)

    def taken(values: dict[str, T]) -> dict[str, T]:
        return {name: value for name, value in values.items() if name.startswith(prefixes)}

    return Snapshot(
        seeds={**saved.seeds, **{slot: newer.seeds[slot] for slot in slots}},
        weights={**saved.weights, **taken(newer.weights)},
        optimizer={**saved.optimizer, **taken(newer.optimizer)},
    )


def restore(saved: Snapshot, model: GrowingHost, optimizer: GrowthOptimizer) -> None:
    """Bring a model and its optimizer back to a snapshot; seeds come and go as it has them. Main thread only."""
    for slot in list(model.seeds):
        if saved.seeds.get(slot) != (model.seed(slot).blueprint, int(model.seed(slot).blend)):
            optimizer.remove(slot)
            model.remove(slot)
    for slot, (blueprint, blend) in saved.seeds.items():
        if slot not in model.seeds:
            model.graft(slot, blueprint, Blend(blend), rng_seed=0)  # its weights are loaded next
            optimizer.add(slot)
    model.load_state_dict(saved.weights)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.torch.param_groups:
        counts_on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            optimizer.torch.state.pop(parameter, None)
            state = saved.optimizer.get(names[parameter])
            if state is not None:
                optimizer.torch.state[parameter] = {
                    key: value.to(_home(key, parameter, counts_on_device), copy=True) for key, value in state.items()
                }


def _home(key: str, parameter: nn.Parameter, counts_on_device: bool) -> torch.device:
    """torch keeps an optimizer's step count on the CPU unless its kernels read it."""
    return torch.device("cpu") if key == "step" and not counts_on_device else parameter.device


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
