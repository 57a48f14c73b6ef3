"""Save the seeds that were added to a network, and put them on a fresh copy of it."""

import json
import pickle
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.grow.additions import (
    ADDITIONS_VERSION,
    CHECKPOINT_KEY,
    build_additions,
    describe_additions,
    load_seeds,
    seeds_of,
)
from esper.grow.network import unwrap

INDEX, SAFE_WEIGHTS, TORCH_WEIGHTS = "esper.json", "seeds.safetensors", "seeds.pt"
SAFETENSORS = "safetensors.torch"  # used where it is installed; otherwise torch's format, read with weights_only


def save_additions(model: nn.Module, directory: str | Path) -> Path:
    """Save the seeds of a network, without the network itself: their weights, and how to build them.

    Returns the directory. `esper.load` puts them on a network with the same parameters.
    """
    model, place = unwrap(model), Path(directory)
    weights = {
        f"{name}.{key}": value.detach().cpu().contiguous()
        for name, seed in seeds_of(model).items()
        for key, value in seed.state_dict().items()
    }
    place.mkdir(parents=True, exist_ok=True)
    is_safe = find_spec(SAFETENSORS.partition(".")[0]) is not None
    file = SAFE_WEIGHTS if is_safe else TORCH_WEIGHTS
    if is_safe:
        import_module(SAFETENSORS).save_file(weights, place / file)
    else:
        torch.save(weights, place / file)
    index = describe_additions(model) | {"weights": file}
    (place / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return place


def load_additions(model: nn.Module, directory: str | Path) -> nn.Module:
    """Put saved seeds on a fresh network, which is returned. Own blueprints must be registered first.

    Arguments:
        model: a network with the parameters of the one that was saved
        directory: of `esper.save`; or a checkpoint that a Trainer with `esper.Grow` has written, for a LightningModule,
            whose weights are then loaded too
    """
    base, place = unwrap(model), Path(directory)
    if place.is_file():
        return load_checkpoint(model, place)
    index = _read_index(place)
    build_additions(base, index, str(place))
    load_seeds(base, _read_weights(place / index["weights"]), str(place))
    return model


def load_checkpoint(model: nn.Module, file: Path) -> nn.Module:
    """Load a checkpoint of Lightning into a fresh LightningModule, with the seeds that had grown."""
    checkpoint = read_torch_file(file)
    if not isinstance(checkpoint, dict) or CHECKPOINT_KEY not in checkpoint or "state_dict" not in checkpoint:
        raise ValueError(f"{file}: must be a checkpoint of a Trainer with esper.Grow, or a directory of esper.save.")
    base = unwrap(model)
    build_additions(base, checkpoint[CHECKPOINT_KEY], str(file))
    base.load_state_dict(checkpoint["state_dict"])
    return model


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
    if file.name != SAFE_WEIGHTS:
        saved: dict[str, Tensor] = read_torch_file(file)
        return saved
    if find_spec(SAFETENSORS.partition(".")[0]) is None:
        raise ValueError(f"{file}: needs safetensors, which is not installed.")
    broken = import_module(SAFETENSORS.partition(".")[0]).SafetensorError
    try:
        loaded: dict[str, Tensor] = import_module(SAFETENSORS).load_file(file)
    except (OSError, RuntimeError, broken) as error:
        raise ValueError(f"{file}: is not readable ({error}).") from None
    return loaded


def read_torch_file(file: Path) -> Any:
    """What torch has saved in a file, if it is plain data."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file}: is not readable ({error}).") from None
