"""The registry of blueprints, by topology and name."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from esper.flops import Flops

Factory = Callable[..., nn.Module]
KINDS = ("spatial", "channel_mixing", "normalising", "gating", "sequence")  # what a seed can do to features
GLOBAL = math.inf  # reach of a seed that sees all positions


@dataclass(frozen=True)
class Blueprint:
    """What a seed is built from.

    Arguments:
        name: unique in its topology
        topology: the kind of host that it fits, such as cnn or transformer
        description: one line for the listing
        parameters: number of parameters, from the number of channels
        factory: builds the module: (channels, **arguments) -> nn.Module
        flops: cost of one sample, from the number of channels and of positions (pixels or tokens); None measures it
        kinds: what it does to features, of KINDS; controllers see it
        reach: how many positions away it sees, such as 1 for a 3x3 convolution; GLOBAL is all of them
    """

    name: str
    topology: str
    description: str
    parameters: Callable[[int], int]
    factory: Factory
    flops: Callable[[int, int], Flops] | None = None
    kinds: tuple[str, ...] = ()
    reach: float = 0

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ValueError(
                f"{self.topology} blueprint {self.name}: kind {', '.join(unknown)} is unknown; allowed are "
                f"{', '.join(KINDS)}."
            )
        if not self.reach >= 0:
            raise ValueError(f"{self.topology} blueprint {self.name}: reach={self.reach} must be at least 0.")

    @property
    def traits(self) -> tuple[str, ...]:
        """Its kinds and its reach, as text."""
        return (*self.kinds, f"reach {self.reach:g}")

    def build(self, channels: int, **arguments: object) -> nn.Module:
        """A new module for `channels` channels: it keeps the shape, is the identity, and has a non-zero gradient."""
        names = [name for name in inspect.signature(self.factory).parameters if name != "channels"]
        for argument in arguments:
            if argument not in names:
                allowed = ", ".join(names) or "none"
                raise ValueError(
                    f"{self.topology} blueprint {self.name}: argument {argument} is unknown; allowed: {allowed}."
                )
        return self.factory(channels, **arguments)


_REGISTRY: dict[str, dict[str, Blueprint]] = {}


def register(
    topology: str,
    name: str,
    parameters: Callable[[int], int],
    description: str,
    flops: Callable[[int, int], Flops] | None = None,
    *,
    kinds: Sequence[str] = (),
    reach: float = 0,
) -> Callable[[Factory], Factory]:
    """Decorator that registers a factory (channels, **arguments) -> nn.Module; the arguments are those of Blueprint."""

    def add(factory: Factory) -> Factory:
        family = _REGISTRY.setdefault(topology, {})
        if name in family:
            raise ValueError(f"{topology} blueprint {name} is already registered; choose another name.")
        family[name] = Blueprint(name, topology, description, parameters, factory, flops, tuple(kinds), reach)
        return factory

    return add


def blueprints(topology: str) -> dict[str, Blueprint]:
    """All blueprints of a topology, in order of registration."""
    if topology not in _REGISTRY:
        raise ValueError(f"topology={topology}: is unknown; allowed are {', '.join(_REGISTRY)}.")
    return dict(_REGISTRY[topology])


def blueprint(topology: str, name: str) -> Blueprint:
    """One blueprint."""
    family = blueprints(topology)
    if name not in family:
        raise ValueError(f"blueprint={name}: is unknown among {topology} blueprints; allowed are {', '.join(family)}.")
    return family[name]


def add_missing(entries: Iterable[Blueprint]) -> None:
    """Register blueprints of another process that are not registered in this one."""
    for entry in entries:
        _REGISTRY.setdefault(entry.topology, {}).setdefault(entry.name, entry)


def topologies() -> tuple[str, ...]:
    """All topologies that have blueprints."""
    return tuple(_REGISTRY)


def format_blueprints(topology: str, channels: Sequence[int]) -> str:
    """A table of a topology's blueprints with their parameter counts, smallest first."""
    rows = sorted(blueprints(topology).values(), key=lambda entry: entry.parameters(channels[-1]))
    header = f"{topology + ' blueprint':<24}" + "".join(f"{f'C={c}':>11}" for c in channels)
    return "\n".join(
        [
            header,
            *(
                f"{e.name:<24}" + "".join(f"{e.parameters(c):>11,}" for c in channels) + f"  {e.description}"
                for e in rows
            ),
        ]
    )
