"""Export a grown network to one file of plain data, and load it as an ordinary module.

The file is a dictionary that torch loads with `weights_only=True`:

| entry | contents |
|---|---|
| format, version | the file format |
| host | `target`, the dotted name of its class, and `arguments`, the keyword arguments of its constructor |
| seeds | the seeds in the output, in the order of their slots: slot, blueprint, blend and alpha of each |
| weights | parameters and buffers of the folded network by name, on the CPU; tied weights share their memory |
| about | further plain data, such as how inputs are prepared |
"""

import pickle
import zipfile
import zlib
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.files import write_buffered
from esper.growth.model import GrowingHost
from esper.growth.modes import Mode, SeedSettings
from esper.growth.seed import Seed
from esper.hosts import Host
from esper.lifecycle import Blend
from esper.rng import seeded_init

FORMAT = "esper grown network"
GROWN_VERSION = 1
SCALARS = (type(None), bool, int, float, str)  # exact types: a subclass, such as numpy's float, is not plain data
UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)


class BlendedSeed(nn.Module):
    """A seed at a fixed alpha."""

    def __init__(self, seed: Seed, alpha: float) -> None:
        super().__init__()
        self.seed = seed
        self.alpha = alpha

    def forward(self, h: Tensor) -> Tensor:
        out: Tensor = self.seed(h, self.alpha)
        return out

    def extra_repr(self) -> str:
        return f"blend={self.seed.blend.name}, alpha={self.alpha}"


class GrownNetwork(nn.Module):
    """A host with its folded seeds; takes the same input as the host.

    Arguments:
        host: the host, which runs between the slots
        seeds: by slot, in the order of the slots: a module that maps the features at its slot to new features
        about: plain data for the user of the network
    """

    def __init__(self, host: Host, seeds: Mapping[str, nn.Module], about: dict[str, Any]) -> None:
        super().__init__()
        self.host = host
        self.seeds = nn.ModuleDict(seeds)
        self.about = about

    def forward(self, x: Tensor) -> Tensor:
        at = None
        for slot, seed in self.seeds.items():
            h = self.host.run(x, at, slot)
            x = seed(h).to(h.dtype)  # under autocast, a layer may return another precision
            at = slot
        return self.host.run(x, at)


def export(
    path: str | Path, model: GrowingHost, settings: SeedSettings, *, host: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Write a growing host with its seeds to a file; the model does not change. Main thread only.

    Seeds that are not in the output are left out. The file is written atomically. The network is rebuilt from its
    contents first, so that a network that cannot be loaded is refused before anything is written.

    Arguments:
        path: the file to write
        model: the growing host
        settings: mode and alpha of its seeds
        host: `target`, the dotted name of the host's class, and `arguments`, all keyword arguments of its constructor
        about: plain data to store with the network
    """
    path = Path(path)
    alphas = {name: s.alpha for name, s in settings.items() if s.mode is not Mode.ISOLATED and s.alpha > 0}
    grown = _fold(model, alphas, {})
    contents = {
        "format": FORMAT,
        "version": GROWN_VERSION,
        "host": _to_plain("host", host),
        "seeds": [
            [slot, model.seed(slot).blueprint, model.seed(slot).blend.name, float(alphas[slot])] for slot in grown.seeds
        ],
        "weights": _copy_to_cpu(_tensors(grown)),
        "about": _to_plain("about", about),
    }
    rebuilt = _rebuild(contents, path)
    if type(rebuilt.host) is not type(model.host):
        raise ValueError(f"host.target={host['target']}: must be the class of the host, {type(model.host).__name__}.")
    write_buffered(path, partial(torch.save, contents))


def load_grown(path: str | Path) -> GrownNetwork:
    """Load a network from a file that `export` wrote, on the CPU and in eval mode. Main thread only.

    Its outputs are bit-equal to those of the growing host. No code in the file is executed, but the module of the
    host's class is imported. Register custom blueprints first.
    """
    path = Path(path)
    return _rebuild(_read(path), path)


def _fold(model: GrowingHost, alphas: Mapping[str, float], about: dict[str, Any]) -> GrownNetwork:
    """Host and seeds as one network, which shares its modules with the growing host."""
    slots = [slot.name for slot in model.host.slots if slot.name in model.seeds and slot.name in alphas]
    return GrownNetwork(model.host, {slot: _fold_seed(model.seed(slot), alphas[slot]) for slot in slots}, about)


def _fold_seed(seed: Seed, alpha: float) -> nn.Module:
    """A module for a seed at a fixed alpha. A cross-fade at alpha 1 is exactly the seed's body."""
    return seed.body if seed.blend is Blend.ADD and alpha == 1 else BlendedSeed(seed, alpha)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, not copied: tied weights are one tensor."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _copy_to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU; tied weights stay one tensor, so that they are stored once."""
    copies = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in tensors.values()}
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _to_plain(key: str, value: object) -> object:
    """The value as dictionaries, lists and tuples of scalars; raises ValueError with the key of anything else."""
    if isinstance(value, Mapping):
        return {_to_plain(key, name): _to_plain(f"{key}.{name}", entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [_to_plain(f"{key}.{index}", entry) for index, entry in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    if type(value) not in SCALARS:
        raise ValueError(
            f"{key}={value}: must be plain data, such as a number or a string, not {type(value).__name__}."
        )
    return value


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:  # torch's file format
            damaged = archive.testzip()  # torch does not check the checksums of weights
        if damaged is not None:
            raise zipfile.BadZipFile(damaged)
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: the file does not exist.") from None
    except UNREADABLE:
        raise ValueError(
            f"{path}: is not a readable grown network; it is truncated, damaged, or of another format."
        ) from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise ValueError(f"{path}: is a torch file, but not a grown network.")
    version = contents.get("version")
    if version != GROWN_VERSION:
        raise ValueError(f"{path}: has version {version}; this version of esper reads version {GROWN_VERSION}.")
    return contents


def _rebuild(contents: dict[str, Any], path: Path) -> GrownNetwork:
    """Build a network from the contents of its file."""
    try:
        target, arguments = contents["host"]["target"], dict(contents["host"]["arguments"])
        seeds = {slot: (name, Blend[blend], float(alpha)) for slot, name, blend, alpha in contents["seeds"]}
        weights, about = dict(contents["weights"]), dict(contents["about"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: does not have the entries of a grown network ({error!r}).") from None
    host_class = _load_host_class(target, path)
    with torch.device("cpu"), seeded_init(0):  # any random seed: the weights are replaced below
        try:
            model = GrowingHost(host_class(**arguments), coadapt=True)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: its host {target} cannot be built from its arguments ({_without_period(error)})."
            ) from None
        for slot, (blueprint, blend, _) in seeds.items():
            try:
                model.graft(slot, blueprint, blend, rng_seed=0)
            except ValueError as error:
                raise ValueError(
                    f"{path}: its seed in {slot} cannot be built ({_without_period(error)}); "
                    "custom blueprints must be registered first."
                ) from None
    grown = _fold(model, {slot: alpha for slot, (_, _, alpha) in seeds.items()}, about)
    _set_weights(grown, weights, path)
    return grown.eval()


def _load_host_class(target: str, path: Path) -> type[Host]:
    module, _, name = target.rpartition(".")
    host_class = getattr(import_module(module), name, None) if _module_exists(module) else None
    if host_class is None:
        raise ValueError(f"{path}: its host {target} cannot be imported.")
    if not (isinstance(host_class, type) and issubclass(host_class, Host)):
        raise ValueError(f"{path}: its host {target} is not a subclass of esper.hosts.Host.")
    return host_class


def _module_exists(module: str) -> bool:
    """Whether a module and each of its parent packages exist; checked from the top, because find_spec imports them."""
    parts = module.split(".")
    return all(part.isidentifier() for part in parts) and all(
        find_spec(".".join(parts[:count])) is not None for count in range(1, len(parts) + 1)
    )


def _set_weights(module: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Set a module's weights in their saved precision and memory format, because results depend on both."""
    own = _tensors(module)
    names = own.keys() | weights.keys()
    wrong = sorted(name for name in names if _shape_and_kind(own.get(name)) != _shape_and_kind(weights.get(name)))
    if wrong:
        raise ValueError(f"{path}: its weights do not fit its host and seeds; the first that does not is {wrong[0]}.")
    for name, tensor in own.items():
        tensor.data = weights[name]  # in place, so that tied weights stay tied


def _shape_and_kind(value: object) -> object:
    return (value.shape, value.is_floating_point()) if isinstance(value, Tensor) else None


def _without_period(error: Exception) -> str:
    """The message, to be part of another."""
    return str(error).rstrip(".")
