"""Save the seeds that were added to a network, and put them on a fresh copy of it."""

import json
import pickle
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.grow.network import base_digest, unwrap
from esper.growth import HookedSlot, Mode, attach_slots, find_hooked_slots
from esper.lifecycle import Blend

ADDITIONS_VERSION = 1
INDEX, SAFE_WEIGHTS, TORCH_WEIGHTS = "esper.json", "seeds.safetensors", "seeds.pt"
SAFETENSORS = "safetensors.torch"  # used where it is installed; otherwise torch's format, read with weights_only


def save_additions(model: nn.Module, directory: str | Path) -> Path:
    """Save the seeds of a network, without the network itself: their weights, and how to build them.

    Returns the directory. `esper.load` puts them on a network with the same parameters.
    """
    model, place = unwrap(model), Path(directory)
    slots = {name: slot for name, slot in find_hooked_slots(model).items() if slot.seed is not None}
    weights = {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, slot in slots.items()
        if slot.seed is not None
        for key, value in slot.seed.state_dict().items()
    }
    place.mkdir(parents=True, exist_ok=True)
    is_safe = find_spec(SAFETENSORS.partition(".")[0]) is not None
    file = SAFE_WEIGHTS if is_safe else TORCH_WEIGHTS
    if is_safe:
        import_module(SAFETENSORS).save_file(weights, place / file)
    else:
        torch.save(weights, place / file)
    index = {
        "version": ADDITIONS_VERSION,
        "base": base_digest(model),
        "weights": file,
        "slots": [_describe(slot) for slot in slots.values()],
    }
    (place / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return place


def load_additions(model: nn.Module, directory: str | Path) -> nn.Module:
    """Put saved seeds on a fresh network, which is returned. Own blueprints must be registered first."""
    base, place = unwrap(model), Path(directory)
    index = _read_index(place)
    if index["base"] != base_digest(base):
        raise ValueError(
            f"{place}: belongs to another network; names or shapes of the parameters of {type(base).__name__} differ."
        )
    weights = _read_weights(place / index["weights"])
    slots = [_build(entry, base) for entry in index["slots"]]
    attach_slots(base, slots)
    for slot, entry in zip(slots, index["slots"], strict=True):
        device = next((parameter.device for parameter in base.parameters()), torch.device("cpu"))
        try:
            seed = slot.graft(entry["blueprint"], Blend[entry["blend"]], rng_seed=0, device=device)
            prefix = f"{slot.name}."
            own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
            seed.load_state_dict({key: own[key] for key in seed.state_dict()})
        except (ValueError, KeyError, RuntimeError) as error:
            raise ValueError(f"{place}: the seed in {slot.name} cannot be built ({error}).") from None
        slot.set(Mode(entry["mode"]), entry["alpha"])
    return model


def _describe(slot: HookedSlot) -> dict[str, Any]:
    assert slot.seed is not None
    return {
        "name": slot.name,
        "topology": slot.topology,
        "channels": slot.channels,
        "channels_last": slot.channels_last,
        "output": list(slot.output),
        "keywords": list(slot.keywords),
        "dtype": str(slot.dtype).removeprefix("torch."),
        "blueprint": slot.seed.blueprint,
        "blend": slot.seed.blend.name,
        "mode": slot.mode.value,
        "alpha": slot.alpha.item(),
    }


def _build(entry: dict[str, Any], model: nn.Module) -> HookedSlot:
    if entry["name"] not in dict(model.named_modules()):
        raise ValueError(f"slot={entry['name']}: must be a module of {type(model).__name__}, but there is none.")
    return HookedSlot(
        entry["name"],
        topology=entry["topology"],
        channels=entry["channels"],
        channels_last=entry["channels_last"],
        output=tuple(entry["output"]),
        keywords=entry["keywords"],
        dtype=getattr(torch, entry["dtype"]),
    )


def _read_index(place: Path) -> dict[str, Any]:
    try:
        index = json.loads((place / INDEX).read_text())
    except FileNotFoundError:
        raise ValueError(f"{place}: must be a directory of esper.save, but has no {INDEX}.") from None
    except ValueError:
        raise ValueError(f"{place / INDEX}: is not readable; it is truncated, or of another program.") from None
    if not isinstance(index, dict) or index.get("version") != ADDITIONS_VERSION:
        version = index.get("version") if isinstance(index, dict) else None
        raise ValueError(f"{place / INDEX}: has version {version}; this esper reads version {ADDITIONS_VERSION}.")
    return index


def _read_weights(file: Path) -> dict[str, Tensor]:
    try:
        if file.name == SAFE_WEIGHTS:
            if find_spec(SAFETENSORS.partition(".")[0]) is None:
                raise ValueError(f"{file}: needs safetensors, which is not installed.")
            loaded: dict[str, Tensor] = import_module(SAFETENSORS).load_file(file)
        else:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file}: is not readable ({error}).") from None
    return loaded
