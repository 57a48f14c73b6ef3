"""A grown network in one file of plain data, and back from it as an ordinary module.

The file is a dictionary that torch loads with `weights_only=True`:

| entry | holds |
|---|---|
| format, version | what the file is |
| host | `target`, the dotted name of its class, and `arguments`, the keyword arguments it was built with |
| seeds | those that take part, in the order of their slots: slot, blueprint, blend and alpha of each |
| weights | parameters and buffers of the folded network by name, on the CPU; tied ones share their memory |
| about | whatever else there is to say, above all how inputs are prepared |
"""

import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from esper.growth.model import GrowingHost, Mode, SeedSettings
from esper.growth.seed import Seed
from esper.hosts import Host
from esper.lifecycle import Blend
from esper.rng import seeded_init

FORMAT = "esper grown network"
VERSION = 1
SCALARS = (type(None), bool, int, float, str)  # exactly these: a subclass, such as numpy's float, is no plain data
UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)


class BlendedSeed(nn.Module):
    """A seed at an alpha that no longer changes."""

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
    """A host with what its seeds have become, by slot; takes what the host takes.

    Arguments:
        host: runs between the slots
        seeds: modules that turn the features at their slots into what the host goes on with, in the order of the slots
        about: plain data for whoever uses it
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
            x = seed(h).to(h.dtype)  # under autocast, a layer may answer in another precision
            at = slot
        return self.host.run(x, at)


def export(
    path: str | Path, model: GrowingHost, settings: SeedSettings, *, host: Mapping[str, Any], about: Mapping[str, Any]
) -> None:
    """Write the network that `settings` make of a growing host; the model stays as it is. Main thread only.

    Seeds that take no part are left out. The file is whole or not there, and has been rebuilt once before it is
    written, so that one that could never be loaded is refused while the network is still there.

    Arguments:
        host: `target`, the dotted name of the host's class, and `arguments`, all keyword arguments it was built with
        about: plain data to go with the network
    """
    path = Path(path)
    alphas = {name: s.alpha for name, s in settings.items() if s.mode is not Mode.ISOLATED and s.alpha > 0}
    grown = _folded(model, alphas, {})
    contents = {
        "format": FORMAT,
        "version": VERSION,
        "host": _plain("host", host),
        "seeds": [
            [slot, model.seed(slot).blueprint, model.seed(slot).blend.name, float(alphas[slot])] for slot in grown.seeds
        ],
        "weights": _copied(_tensors(grown)),
        "about": _plain("about", about),
    }
    rebuilt = _rebuilt(contents, path)
    if type(rebuilt.host) is not type(model.host):
        raise ValueError(f"host.target={host['target']}: the host to export is of class {type(model.host).__name__}.")
    _write(contents, path)


def load_grown(path: str | Path) -> GrownNetwork:
    """The network in a file that `export` wrote, on the CPU and in eval mode. Main thread only.

    Its outputs are bit-equal to those it had while it grew. Nothing in the file is executed, but the module of its
    host's class is imported. Blueprints of your own must be registered before.
    """
    path = Path(path)
    return _rebuilt(_read(path), path)


def _folded(model: GrowingHost, alphas: Mapping[str, float], about: dict[str, Any]) -> GrownNetwork:
    """Host and seeds as one network, which shares its modules with the growing host."""
    slots = [slot.name for slot in model.host.slots if slot.name in model.seeds and slot.name in alphas]
    return GrownNetwork(model.host, {slot: _part(model.seed(slot), alphas[slot]) for slot in slots}, about)


def _part(seed: Seed, alpha: float) -> nn.Module:
    """What is left of a seed. A cross-fade that has come to its end gives exactly the seed's own features."""
    return seed.body if seed.blend is Blend.ADD and alpha == 1 else BlendedSeed(seed, alpha)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, as they are: tied ones are one tensor."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU; what was one tensor stays one, so that it is stored once."""
    copies = {id(tensor): tensor.detach().to("cpu", copy=True) for tensor in tensors.values()}
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def _plain(key: str, value: object) -> object:
    """The same in dictionaries, lists and tuples as torch loads them; what is no plain data is refused by its key."""
    if isinstance(value, Mapping):
        return {_plain(key, name): _plain(f"{key}.{name}", entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        entries = [_plain(f"{key}.{index}", entry) for index, entry in enumerate(value)]
        return tuple(entries) if isinstance(value, tuple) else entries
    if type(value) not in SCALARS:
        raise ValueError(f"{key}={value}: must be plain data, like a number or a text, not a {type(value).__name__}.")
    return value


def _write(contents: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:  # as all of torch's files are
            damaged = archive.testzip()  # torch itself takes changed bytes for weights
        if damaged is not None:
            raise zipfile.BadZipFile(damaged)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file.") from None
    except UNREADABLE:
        raise ValueError(
            f"{path}: is no grown network that can be read; it is cut off, damaged, or of another program."
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path}: is a file of torch, but no grown network.")
    version = found.get("version")
    if version != VERSION:
        raise ValueError(f"{path}: has version {version}, of another esper; this one reads version {VERSION}.")
    return found


def _rebuilt(contents: dict[str, Any], path: Path) -> GrownNetwork:
    try:
        target, arguments = contents["host"]["target"], dict(contents["host"]["arguments"])
        seeds = {slot: (kind, Blend[blend], float(alpha)) for slot, kind, blend, alpha in contents["seeds"]}
        weights, about = dict(contents["weights"]), dict(contents["about"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its entries are not those of a grown network ({error!r}).") from None
    kind = _host_class(target, path)
    with torch.device("cpu"), seeded_init(0):  # any seed: the weights follow
        try:
            model = GrowingHost(kind(**arguments), coadapt=True)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: its host {target} cannot be built from its arguments ({_inner(error)})."
            ) from None
        for slot, (blueprint, blend, _) in seeds.items():
            try:
                model.graft(slot, blueprint, blend, rng_seed=0)
            except ValueError as error:
                raise ValueError(
                    f"{path}: its seed in {slot} cannot be built ({_inner(error)}); "
                    "blueprints of your own must be registered before."
                ) from None
    grown = _folded(model, {slot: alpha for slot, (_, _, alpha) in seeds.items()}, about)
    _fill(grown, weights, path)
    return grown.eval()


def _host_class(target: str, path: Path) -> type[Host]:
    module, _, name = target.rpartition(".")
    found = getattr(import_module(module), name, None) if _is_there(module) else None
    if found is None:
        raise ValueError(f"{path}: its host {target} is not there to be imported.")
    if not (isinstance(found, type) and issubclass(found, Host)):
        raise ValueError(f"{path}: its host {target} is no subclass of esper.hosts.Host.")
    return found


def _is_there(module: str) -> bool:
    """Whether a module can be found, under each of its packages in turn."""
    parts = module.split(".")
    return all(part.isidentifier() for part in parts) and all(
        find_spec(".".join(parts[:count])) is not None for count in range(1, len(parts) + 1)
    )


def _fill(module: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Give a module its weights in the precision and memory format they were saved in: the last bits depend on both."""
    own = _tensors(module)
    wrong = sorted(name for name in own.keys() | weights.keys() if _fit(own.get(name)) != _fit(weights.get(name)))
    if wrong:
        raise ValueError(f"{path}: its weights do not fit its host and seeds; the first that does not is {wrong[0]}.")
    for name, tensor in own.items():
        tensor.data = weights[name]  # in place, so that tied weights stay tied


def _fit(value: object) -> object:
    return (value.shape, value.is_floating_point()) if isinstance(value, Tensor) else None


def _inner(error: Exception) -> str:
    """A sentence inside another."""
    return str(error).rstrip(".")
