"""A seed: a blueprint's module, and the operator that blends it into the host's features."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from esper.blueprints import blueprint as find_blueprint
from esper.blueprints.layers import randomise_zero_layers
from esper.flops import Flops, linear_flops
from esper.lifecycle import Blend
from esper.rng import seeded_init

Alpha = float | Tensor  # how much of a seed is blended in; a tensor has no dimensions
GATE_HIDDEN = 8  # minimum width; a quarter of the channels if that is more


class BlendGate(nn.Module):
    """The learned gate of a GATED seed: features [batch, ...] -> values in (0, 1) of shape [batch, 1, ...]."""

    def __init__(self, channels: int, topology: str) -> None:
        super().__init__()
        hidden = self.hidden(channels)
        self.layers = nn.Sequential(nn.Linear(channels, hidden), nn.SiLU(), nn.Linear(hidden, 1), nn.Sigmoid())
        self.image = topology == "cnn"

    @staticmethod
    def hidden(channels: int) -> int:
        """Width of the hidden layer."""
        return max(GATE_HIDDEN, channels // 4)

    @staticmethod
    def flops(channels: int, topology: str, positions: int) -> Flops:
        """FLOPs of one sample: one gate for an image, one at each position of a text."""
        gates = 1 if topology == "cnn" else positions
        return linear_flops(channels, BlendGate.hidden(channels), gates) + linear_flops(
            BlendGate.hidden(channels), 1, gates
        )

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3)) if self.image else x.cumsum(1) / _positions(x)  # causal: a running mean
        gate: Tensor = self.layers(pooled)
        return gate[:, :, None, None] if self.image else gate


def _positions(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).unsqueeze(1)


def _add(seed: "Seed", h: Tensor, s: Tensor, alpha: Alpha) -> Tensor:
    return torch.lerp(h, s, alpha)


def _multiply(seed: "Seed", h: Tensor, s: Tensor, alpha: Alpha) -> Tensor:
    return h * (1 + alpha * torch.tanh(s - h))


def _gated(seed: "Seed", h: Tensor, s: Tensor, alpha: Alpha) -> Tensor:
    assert seed.gate is not None
    return torch.lerp(h, s, alpha * seed.gate(h).to(h.dtype))


OPERATORS: dict[Blend, Callable[["Seed", Tensor, Tensor, Alpha], Tensor]] = {
    Blend.ADD: _add,  # cross-fade: only the seed at alpha 1
    Blend.MULTIPLY: _multiply,  # the host's features times 1 - alpha to 1 + alpha
    Blend.GATED: _gated,  # cross-fade with a learned gate
}


class Seed(nn.Module):
    """A blueprint's module and its blend operator.

    `forward(h, alpha)` returns the host's features h with the seed blended in; at alpha 0 that is h.

    Arguments:
        body: the module that the blueprint builds
        blueprint: its name
        blend: the operator that combines its output with h
        channels: channels of h
        topology: cnn or transformer
    """

    def __init__(self, body: nn.Module, *, blueprint: str, blend: Blend, channels: int, topology: str) -> None:
        super().__init__()
        self.body = body
        self.blueprint = blueprint
        self.blend = blend
        self.channels, self.topology = channels, topology
        self.gate = BlendGate(channels, topology) if blend is Blend.GATED else None

    def forward(self, h: Tensor, alpha: Alpha) -> Tensor:
        if isinstance(alpha, Tensor):
            alpha = alpha.to(h.dtype)
        s = self.body(h).to(h.dtype)  # under autocast, a layer may return another precision
        if s.shape != h.shape:
            raise ValueError(
                f"blueprint={self.blueprint}: must return features of shape {list(h.shape)}, not {list(s.shape)}."
            )
        return OPERATORS[self.blend](self, h, s, alpha)


def make_seed(
    topology: str,
    blueprint: str,
    blend: Blend,
    channels: int,
    *,
    rng_seed: int,
    init: Literal["identity", "random"] = "identity",
) -> Seed:
    """A new seed; its initial weights follow from `rng_seed`. Main thread only.

    With `init` random, layers that the blueprint sets to zero have random weights instead, so that the new seed is not
    the identity.
    """
    with seeded_init(rng_seed):
        body = find_blueprint(topology, blueprint).build(channels)
        seed = Seed(body, blueprint=blueprint, blend=blend, channels=channels, topology=topology)
        if init == "random":
            randomise_zero_layers(body)
    return seed
