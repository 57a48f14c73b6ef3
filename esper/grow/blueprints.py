"""Blueprints of the user's own."""

from collections.abc import Callable, Sequence

import torch

from esper.blueprints import register
from esper.blueprints.registry import Factory
from esper.flops import Flops


def register_blueprint(
    name: str,
    *,
    topology: str,
    description: str = "",
    kinds: Sequence[str] = (),
    reach: float = 0,
    parameters: Callable[[int], int] | None = None,
    flops: Callable[[int, int], Flops] | None = None,
) -> Callable[[Factory], Factory]:
    """Decorator that registers a function (channels) -> nn.Module as a blueprint.

    The module must keep the shape of its input, be the identity when new, and have a non-zero gradient.

    Arguments:
        name: unique in its topology
        topology: cnn for [batch, channels, height, width], transformer for [batch, time, channels]
        description: one line for listings
        kinds: what it does to features: spatial, channel_mixing, normalising, gating, sequence; controllers see it
        reach: how many positions away it sees, such as 1 for a 3x3 convolution
        parameters: number of parameters, from the number of channels; None counts them
        flops: cost of one sample, from the numbers of channels and positions; None measures it
    """

    def add(factory: Factory) -> Factory:
        def count(channels: int) -> int:
            with torch.device("meta"):
                return sum(parameter.numel() for parameter in factory(channels).parameters())

        return register(
            topology, name, parameters or count, description or name, flops, kinds=tuple(kinds), reach=reach
        )(factory)

    return add
