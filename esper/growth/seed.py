"""A seed in its slot: a blueprint's module, and the operator that blends it into the host's features."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from esper.flops import Flops, linear_flops
from esper.lifecycle import Blend

GATE_HIDDEN = 8  # at least; a quarter of the channels where that is more


class BlendGate(nn.Module):
    """How much of a gated seed to let in, per sample: [batch, ...] -> (0, 1) of shape [batch, 1, ...]."""

    def __init__(self, channels: int, topology: str) -> None:
        super().__init__()
        hidden = self.hidden(channels)
        self.layers = nn.Sequential(nn.Linear(channels, hidden), nn.SiLU(), nn.Linear(hidden, 1), nn.Sigmoid())
        self.image = topology == "cnn"

    @staticmethod
    def hidden(channels: int) -> int:
        return max(GATE_HIDDEN, channels // 4)

    @staticmethod
    def flops(channels: int, topology: str, positions: int) -> Flops:
        """One gate for an image; one at each position of a text."""
        gates = 1 if topology == "cnn" else positions
        return linear_flops(channels, BlendGate.hidden(channels), gates) + linear_flops(
            BlendGate.hidden(channels), 1, gates
        )

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3)) if self.image else x.cumsum(1) / _positions(x)  # a position sees only the past
        gate: Tensor = self.layers(pooled)
        return gate[:, :, None, None] if self.image else gate


def _positions(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).unsqueeze(1)


def _add(seed: "Seed", h: Tensor, s: Tensor, alpha: float) -> Tensor:
    return torch.lerp(h, s, alpha)


def _multiply(seed: "Seed", h: Tensor, s: Tensor, alpha: float) -> Tensor:
    return h * (1 + alpha * torch.tanh(s - h))


def _gated(seed: "Seed", h: Tensor, s: Tensor, alpha: float) -> Tensor:
    assert seed.gate is not None
    return torch.lerp(h, s, alpha * seed.gate(h).to(h.dtype))


OPERATORS: dict[Blend, Callable[["Seed", Tensor, Tensor, float], Tensor]] = {
    Blend.ADD: _add,  # a cross-fade: all seed at alpha 1
    Blend.MULTIPLY: _multiply,  # between 1 - alpha and 1 + alpha times the host's features
    Blend.GATED: _gated,  # a cross-fade under a learned gate
}


class Seed(nn.Module):
    """forward(h, alpha): the host's features h with alpha of the seed blended in. At alpha 0 that is h."""

    def __init__(self, body: nn.Module, *, blueprint: str, blend: Blend, channels: int, topology: str) -> None:
        super().__init__()
        self.body = body
        self.blueprint = blueprint
        self.blend = blend
        self.gate = BlendGate(channels, topology) if blend is Blend.GATED else None

    def forward(self, h: Tensor, alpha: float) -> Tensor:
        s = self.body(h).to(h.dtype)  # under autocast, a layer may answer in another precision
        if s.shape != h.shape:
            raise ValueError(f"blueprint {self.blueprint} turned features {list(h.shape)} into {list(s.shape)}.")
        return OPERATORS[self.blend](self, h, s, alpha)
