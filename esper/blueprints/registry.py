"""Blueprints by name: what a seed can be built from."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from esper.flops import Flops

Factory = Callable[..., nn.Module]


@dataclass(frozen=True)
class Blueprint:
    """A kind of seed.

    `parameters` is its stated number of parameters for a number of channels; `work` its stated cost for a number of
    channels and of positions, which are pixels or tokens. A blueprint may leave that open; then it is counted.
    """

    name: str
    topology: str
    description: str
    parameters: Callable[[int], int]
    factory: Factory
    flops: Callable[[int, int], Flops] | None = None

    def build(self, channels: int, **arguments: object) -> nn.Module:
        """A seed for `channels` channels: shape-preserving, the identity at birth, and ready to learn."""
        known = [name for name in inspect.signature(self.factory).parameters if name != "channels"]
        for argument in arguments:
            if argument not in known:
                allowed = ", ".join(known) or "none"
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
) -> Callable[[Factory], Factory]:
    """Make a factory of seeds known: a callable (channels, **arguments) -> nn.Module; the rest is as in Blueprint."""

    def keep(factory: Factory) -> Factory:
        family = _REGISTRY.setdefault(topology, {})
        if name in family:
            raise ValueError(f"{topology} blueprint {name} is registered already; choose another name.")
        family[name] = Blueprint(name, topology, description, parameters, factory, flops)
        return factory

    return keep


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


def topologies() -> tuple[str, ...]:
    return tuple(_REGISTRY)


def format_blueprints(topology: str, channels: Sequence[int]) -> str:
    """A table of a topology's blueprints with their parameter counts, smallest first."""
    rows = sorted(blueprints(topology).values(), key=lambda entry: entry.parameters(channels[-1]))
    head = f"{topology + ' blueprint':<24}" + "".join(f"{f'C={c}':>11}" for c in channels)
    return "\n".join(
        [
            head,
            *(
                f"{e.name:<24}" + "".join(f"{e.parameters(c):>11,}" for c in channels) + f"  {e.description}"
                for e in rows
            ),
        ]
    )
