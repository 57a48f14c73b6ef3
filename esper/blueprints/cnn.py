"""Blueprints for convolutional hosts: features [batch, channels, height, width] in, the same shape out.

Convolutional seeds are pre-activation residuals: GroupNorm and ReLU first, and the last convolution is initialised to
zero. GroupNorm has no running statistics that could drift while the seed trains in isolation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.blueprints.layers import FadedNorm, Residual
from esper.blueprints.registry import GLOBAL, register
from esper.flops import Flops, conv_flops, linear_flops

GROUP_CHANNELS = 16  # minimum per group, if there are as many channels; the statistics of smaller groups are noisy


class GroupNorm(nn.GroupNorm):
    """torch's GroupNorm, for the detached features that a seed reads while it trains in isolation.

    On CPU, torch's backward pass of GroupNorm in channels_last crashes the process if the input requires no gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()
        return super().forward(x)


def _norm(channels: int) -> GroupNorm:
    groups = next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0 and (channels // g >= GROUP_CHANNELS or g == 1))
    return GroupNorm(groups, channels)


def _conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)


@register(
    "cnn",
    "norm",
    lambda c: 2 * c + 1,
    "group normalisation, faded in by a learned scale",
    lambda c, p: Flops(),
    kinds=["normalising"],
)
def group_norm(channels: int) -> nn.Module:
    return FadedNorm(_norm(channels))


@register(
    "cnn",
    "attention",
    lambda c: 2 * c * max(1, c // 4) + c,
    "squeeze-excite: a gate per channel, initialised to 1",
    lambda c, p: linear_flops(c, max(1, c // 4)) + linear_flops(max(1, c // 4), c),
    kinds=["gating"],
    reach=GLOBAL,
)
class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, reduction: int = 4) -> None:
        super().__init__()
        hidden = max(1, channels // reduction)
        self.squeeze = nn.Linear(channels, hidden, bias=False)
        self.excite = nn.Linear(hidden, channels)
        nn.init.zeros_(self.excite.weight)
        nn.init.zeros_(self.excite.bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = 2 * torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3))))))
        return x * gate[:, :, None, None]


@register(
    "cnn",
    "spatial",
    lambda c: 9 * c,
    "depthwise 3x3 alone",
    lambda c, p: conv_flops(c, c, 3, p, groups=c),
    kinds=["spatial"],
    reach=1,
)
def spatial(channels: int) -> nn.Module:
    return Residual(_conv(channels, channels, 3, channels))


@register(
    "cnn",
    "depthwise",
    lambda c: c * c + 11 * c,
    "depthwise 3x3, then 1x1",
    lambda c, p: conv_flops(c, c, 3, p, groups=c) + conv_flops(c, c, 1, p),
    kinds=["spatial", "channel_mixing"],
    reach=1,
)
def depthwise(channels: int) -> nn.Module:
    return Residual(_norm(channels), nn.ReLU(), _conv(channels, channels, 3, channels), _conv(channels, channels, 1))


def _inner(channels: int) -> int:
    return max(8, channels // 4)


@register(
    "cnn",
    "bottleneck",
    lambda c: 2 * c * _inner(c) + 9 * _inner(c) ** 2 + 2 * c,
    "1x1 down, 3x3, 1x1 up",
    lambda c, p: (
        conv_flops(c, _inner(c), 1, p) + conv_flops(_inner(c), _inner(c), 3, p) + conv_flops(_inner(c), c, 1, p)
    ),
    kinds=["spatial", "channel_mixing"],
    reach=1,
)
def bottleneck(channels: int) -> nn.Module:
    inner = _inner(channels)
    return Residual(
        _norm(channels),
        nn.ReLU(),
        _conv(channels, inner, 1),
        nn.ReLU(),
        _conv(inner, inner, 3),
        nn.ReLU(),
        _conv(inner, channels, 1),
    )


@register(
    "cnn",
    "conv_small",
    lambda c: c * c + 2 * c,
    "1x1 convolution",
    lambda c, p: conv_flops(c, c, 1, p),
    kinds=["channel_mixing"],
)
def conv_small(channels: int) -> nn.Module:
    return Residual(_norm(channels), nn.ReLU(), _conv(channels, channels, 1))


@register(
    "cnn",
    "conv_light",
    lambda c: 9 * c * c + 2 * c,
    "3x3 convolution",
    lambda c, p: conv_flops(c, c, 3, p),
    kinds=["spatial", "channel_mixing"],
    reach=1,
)
def conv_light(channels: int) -> nn.Module:
    return Residual(_norm(channels), nn.ReLU(), _conv(channels, channels, 3))


@register(
    "cnn",
    "conv_heavy",
    lambda c: 18 * c * c + 4 * c,
    "two 3x3 convolutions",
    lambda c, p: conv_flops(c, c, 3, p) + conv_flops(c, c, 3, p),
    kinds=["spatial", "channel_mixing"],
    reach=2,
)
def conv_heavy(channels: int) -> nn.Module:
    return Residual(
        _norm(channels),
        nn.ReLU(),
        _conv(channels, channels, 3),
        _norm(channels),
        nn.ReLU(),
        _conv(channels, channels, 3),
    )
