"""How to build the slots and seeds of a network again, as plain data."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from esper.grow.network import base_digest
from esper.growth import HookedSlot, Mode, Seed, attach_slots, detach_slots, find_hooked_slots
from esper.lifecycle import Blend

ADDITIONS_VERSION = 1
CHECKPOINT_KEY = "esper"  # entry of a Lightning checkpoint


def seeds_of(model: nn.Module) -> dict[str, Seed]:
    """The seeds of a network by slot."""
    return {name: slot.seed for name, slot in find_hooked_slots(model).items() if slot.seed is not None}


def describe_additions(model: nn.Module) -> dict[str, Any]:
    """The seeds of a network, without their weights."""
    slots = [describe_slot(slot) for slot in find_hooked_slots(model).values() if slot.seed is not None]
    return {"version": ADDITIONS_VERSION, "base": base_digest(model), "slots": slots}


def build_additions(model: nn.Module, index: Mapping[str, Any], source: str) -> None:
    """Give a network the seeds that `describe_additions` describes; it loses those that it has."""
    if index.get("version") != ADDITIONS_VERSION:
        raise ValueError(f"{source}: has version {index.get('version')}; this esper reads version {ADDITIONS_VERSION}.")
    if index["base"] != base_digest(model):
        raise ValueError(
            f"{source}: belongs to another network; names or shapes of the parameters of {type(model).__name__} differ."
        )
    detach_slots(model)
    try:
        build_slots(model, index["slots"])
    except (ValueError, KeyError, RuntimeError) as error:
        detach_slots(model)
        raise ValueError(f"{source}: the seeds cannot be built ({error}).") from None


def load_seeds(model: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load the weights of all seeds, by slot and name."""
    for name, seed in seeds_of(model).items():
        prefix = f"{name}."
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        try:
            seed.load_state_dict({key: own[key] for key in seed.state_dict()})
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"{source}: the seed in {name} cannot be built ({error}).") from None


def describe_slot(slot: HookedSlot) -> dict[str, Any]:
    """A slot and its seed, if it has one."""
    return {
        "name": slot.name,
        "topology": slot.topology,
        "channels": slot.channels,
        "channels_last": slot.channels_last,
        "output": list(slot.output),
        "keywords": list(slot.keywords),
        "dtype": str(slot.dtype).removeprefix("torch."),
        "blueprint": None if slot.seed is None else slot.seed.blueprint,
        "blend": None if slot.seed is None else slot.seed.blend.name,
        "mode": slot.mode.value,
        "alpha": slot.alpha.item(),
    }


def build_slots(model: nn.Module, entries: Sequence[Mapping[str, Any]]) -> None:
    """Attach slots, and put new seeds into those that have one; initial weights mean nothing."""
    modules = dict(model.named_modules())
    missing = [entry["name"] for entry in entries if entry["name"] not in modules]
    if missing:
        raise ValueError(f"slot={missing[0]}: must be a module of {type(model).__name__}, but there is none.")
    if not entries:
        return
    slots = [
        HookedSlot(
            entry["name"],
            topology=entry["topology"],
            channels=entry["channels"],
            channels_last=entry["channels_last"],
            output=tuple(entry["output"]),
            keywords=entry["keywords"],
            dtype=getattr(torch, entry["dtype"]),
        )
        for entry in entries
    ]
    attach_slots(model, slots)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for slot, entry in zip(slots, entries, strict=True):
        if entry["blueprint"] is not None:
            slot.graft(entry["blueprint"], Blend[entry["blend"]], rng_seed=0, device=device)
        slot.set(Mode(entry["mode"]), entry["alpha"])


def copy_structure(source: nn.Module, target: nn.Module) -> None:
    """Give a copy of a network the slots and seeds of it; weights that the copy has already stay as they are."""
    slots, before = find_hooked_slots(source), seeds_of(target)
    old = {name: copy.deepcopy(seed.state_dict()) for name, seed in before.items()}
    kinds = {name: (seed.blueprint, seed.blend) for name, seed in before.items()}
    detach_slots(target)
    build_slots(target, [describe_slot(slot) for slot in slots.values()])
    for name, seed in seeds_of(target).items():
        model_seed = slots[name].seed
        assert model_seed is not None
        is_same = kinds.get(name) == (seed.blueprint, seed.blend)
        seed.load_state_dict(old[name] if is_same else model_seed.state_dict())
