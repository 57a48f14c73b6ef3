"""Blueprints for transformer hosts: features [batch, time, channels] in, the same shape out.

All are causal: no position depends on a later one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.blueprints.layers import FadedNorm, Residual
from esper.blueprints.registry import GLOBAL, register
from esper.flops import Flops, attention_flops, linear_flops


@register(
    "transformer",
    "norm",
    lambda d: 2 * d + 1,
    "layer normalisation, faded in by a learned scale",
    lambda d, p: Flops(),
    kinds=["normalising"],
)
def layer_norm(channels: int) -> nn.Module:
    return FadedNorm(nn.LayerNorm(channels))


@register(
    "transformer",
    "lora",
    lambda d: 16 * d,
    "residual linear layer of rank 8",
    lambda d, p: linear_flops(d, 8, p) + linear_flops(8, d, p),
    kinds=["channel_mixing"],
)
def lora(channels: int, rank: int = 8) -> nn.Module:
    return Residual(nn.Linear(channels, rank, bias=False), nn.Linear(rank, channels, bias=False))


@register(
    "transformer",
    "lora_large",
    lambda d: 64 * d,
    "residual linear layer of rank 32",
    lambda d, p: linear_flops(d, 32, p) + linear_flops(32, d, p),
    kinds=["channel_mixing"],
)
def lora_large(channels: int, rank: int = 32) -> nn.Module:
    return lora(channels, rank)


class CausalAttention(nn.Module):
    """Causal self-attention without its output projection."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError(f"transformer blueprint attention: heads={heads} must divide channels={channels}.")
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [batch, heads, time, d] each
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@register(
    "transformer",
    "attention",
    lambda d: 4 * d * d + 4 * d,
    "causal self-attention, 4 heads",
    lambda d, p: linear_flops(d, 3 * d, p) + attention_flops(d, p) + linear_flops(d, d, p),
    kinds=["sequence", "channel_mixing"],
    reach=GLOBAL,
)
def attention(channels: int, heads: int = 4) -> nn.Module:
    return Residual(CausalAttention(channels, heads), nn.Linear(channels, channels))


@register(
    "transformer",
    "mlp_small",
    lambda d: 4 * d * d + 3 * d,
    "two linear layers, hidden width 2x",
    lambda d, p: linear_flops(d, 2 * d, p) + linear_flops(2 * d, d, p),
    kinds=["channel_mixing"],
)
def mlp_small(channels: int, expansion: int = 2) -> nn.Module:
    hidden = expansion * channels
    return Residual(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))


@register(
    "transformer",
    "mlp",
    lambda d: 8 * d * d + 5 * d,
    "two linear layers, hidden width 4x",
    lambda d, p: linear_flops(d, 4 * d, p) + linear_flops(4 * d, d, p),
    kinds=["channel_mixing"],
)
def mlp(channels: int, expansion: int = 4) -> nn.Module:
    return mlp_small(channels, expansion)


class Window(nn.Module):
    """Concatenates the last `size` positions: [batch, time, channels] -> [batch, time, size x channels]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        padded = F.pad(x, (0, 0, self.size - 1, 0))
        return torch.cat([padded[:, start : start + time] for start in range(self.size)], -1)


@register(
    "transformer",
    "window",
    lambda d: 5 * d * d + 2 * d,
    "two linear layers over the last four positions",
    lambda d, p: linear_flops(4 * d, d, p) + linear_flops(d, d, p),
    kinds=["sequence", "channel_mixing"],
    reach=3,
)
def window(channels: int, size: int = 4) -> nn.Module:
    hidden = nn.Linear(size * channels, channels)
    return Residual(Window(size), hidden, nn.GELU(), nn.Linear(channels, channels))
