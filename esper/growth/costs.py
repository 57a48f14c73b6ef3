"""Parameters and FLOPs of a seed in a slot, before it is built, and FLOPs of any function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from esper.blueprints import Blueprint, blueprint
from esper.flops import Flops, symmetric_flops
from esper.growth.seed import BlendGate, make_seed
from esper.lifecycle import Blend
from esper.rng import seeded_init


def seed_flops(topology: str, name: str, blend: Blend, features: Tensor) -> Flops:
    """FLOPs of one sample of a seed, its blend gate included.

    `features` has the shape of one sample at the slot, [1, ...], on the meta device. A blueprint may state its FLOPs;
    otherwise torch counts them.
    """
    channels = slot_channels(topology, features)
    positions = features.numel() // channels
    entry = blueprint(topology, name)
    body = entry.flops(channels, positions) if entry.flops is not None else _measured_flops(entry, channels, features)
    gate = BlendGate.flops(channels, topology, positions) if blend is Blend.GATED else Flops()
    return body + gate


def _measured_flops(entry: Blueprint, channels: int, features: Tensor) -> Flops:
    try:
        with torch.device("meta"):
            built = entry.build(channels).eval()
        return count_flops(built, features)[0]
    except RuntimeError:  # its forward pass reads values
        with seeded_init(0):
            built = entry.build(channels).eval()
        return count_flops(built, torch.zeros(features.shape))[0]


def seed_parameters(topology: str, name: str, blend: Blend, channels: int) -> int:
    """Parameters of a seed, its blend gate included."""
    with torch.device("meta"):
        seed = make_seed(topology, name, blend, channels, rng_seed=0)
    return sum(parameter.numel() for parameter in seed.parameters())


def slot_channels(topology: str, features: Tensor) -> int:
    """The number of channels of features [batch, channels, height, width] or [batch, time, channels]."""
    return features.shape[1 if topology == "cnn" else -1]


def count_flops(run: Callable[..., Tensor], *arguments: Any) -> tuple[Flops, Tensor]:
    """The cost of a forward pass as counted by torch, and its output."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        out = run(*arguments)
    return symmetric_flops(int(counter.get_total_flops())), out
