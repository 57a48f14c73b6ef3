"""A convolutional classifier, in channels_last."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from esper.arguments import Count, LayerCount
from esper.flops import Flops, conv_flops, linear_flops
from esper.hosts.host import Host, Slot, require_positive, round_half_up

Activation = Literal["relu", "none", "sigmoid", "tanh"]
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


class ChannelsLast(nn.Module):
    """Converts images to channels_last, the memory format in which convolutions are fastest."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


class GlobalMean(nn.Module):
    """Mean over space: [batch, channels, height, width] -> [batch, channels]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _middle(blocks: int) -> int:
    """Index of the block that the waist follows; of two in the middle, the first."""
    return (blocks - 1) // 2


class CNNHost(Host):
    """Blocks of convolution, BatchNorm and ReLU, then the mean over space and a linear classifier.

    Arguments:
        blocks: number of blocks
        channels: channels of the first block; each further block has twice as many
        kernel: side of the convolutions, in pixels; odd
        pools: number of blocks, from the first on, that a 2x2 max-pool follows; more than `blocks` is all of them
        pool_slots: whether there are slots after pools (pool1, ...), in addition to those after blocks (block1, ...)
        resolution: side of the images, in pixels
        classes: number of classes
        shrink: side of the squares that images are averaged over first, in pixels; None is the whole image
        extra_blocks: further blocks of the last width, without slots, between the last block and its pool
        norm: whether blocks have BatchNorm; without it, their convolutions have a bias
        activation: what ends a block; none leaves it out, so that only max-pools are not linear
        mixing: whether convolutions mix channels. If not, the first one reads all colours, and every further one has a
            group for each of its inputs, so that only the classifier combines channels.
        waist: channels that a 1x1 convolution, without norm and activation, reduces the features of the middle block
            to: after its pool, before the next block or the classifier. None is no waist.
    """

    topology: ClassVar[str] = "cnn"

    def __init__(
        self,
        *,
        blocks: LayerCount,
        channels: int,
        kernel: int,
        pools: int,
        pool_slots: bool,
        resolution: int,
        classes: int,
        shrink: int | None = 1,
        extra_blocks: Annotated[int, Ge(0), Le(1000)] = 0,
        norm: bool = True,
        activation: Activation = "relu",
        mixing: bool = True,
        waist: Count | None = None,
    ) -> None:
        shrink = resolution if shrink is None else shrink
        require_positive(blocks=blocks, channels=channels, resolution=resolution, classes=classes, shrink=shrink)
        if extra_blocks < 0:
            raise ValueError(f"host.extra_blocks={extra_blocks}: must be at least 0.")
        if kernel % 2 == 0 or kernel < 1:
            raise ValueError(f"host.kernel={kernel}: must be odd and at least 1.")
        if pools < 0:
            raise ValueError(f"host.pools={pools}: must be at least 0.")
        pools = min(pools, blocks)
        if resolution % shrink:
            raise ValueError(f"host.shrink={shrink}: must divide host.resolution={resolution}.")
        pixels = resolution // shrink
        if pixels >> pools < 1:
            raise ValueError(
                f"host.pools={pools}: must be at most {pixels.bit_length() - 1} for images of {pixels} pixels."
            )
        if activation not in get_args(Activation):
            raise ValueError(f"host.activation={activation}: must be one of {', '.join(get_args(Activation))}.")
        if waist is not None:
            _check_waist(waist, channels << _middle(blocks), mixing)
        segments: list[nn.Module] = []
        slots: list[Slot] = []
        pending: list[nn.Module] = [nn.AvgPool2d(shrink), ChannelsLast()] if shrink > 1 else [ChannelsLast()]

        def end_segment(slot: str, channels: int) -> None:
            segments.append(nn.Sequential(*pending))
            slots.append(Slot(slot, channels))
            pending.clear()

        def add_block(inputs: int, outputs: int) -> None:
            groups = 1 if mixing or not segments else inputs
            pending.append(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=not norm))
            if norm:
                pending.append(nn.BatchNorm2d(outputs))
            if activation != "none":
                pending.append(LAYERS[activation]())

        inputs = 3
        for index in range(blocks):
            outputs = channels << index
            add_block(inputs, outputs)
            end_segment(f"block{index + 1}", outputs)
            for _ in range(extra_blocks if index == blocks - 1 else 0):
                add_block(outputs, outputs)
            if index < pools:
                pending.append(nn.MaxPool2d(2))
                if pool_slots:
                    end_segment(f"pool{index + 1}", outputs)
            inputs = outputs
            if waist is not None and index == _middle(blocks):
                pending.append(nn.Conv2d(outputs, waist, 1, bias=False))
                inputs = waist
        segments.append(nn.Sequential(*pending, GlobalMean(), nn.Linear(inputs, classes)))
        super().__init__(segments, slots)
        self.shrink = shrink
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs

    @classmethod
    def variant_arguments(cls, arguments: Mapping[str, Any], *, width: float, depth: int) -> dict[str, Any]:
        """Channels and waist times `width`, and `depth` further blocks of the last width."""
        channels = round_half_up(arguments["channels"] * width)
        changed = {
            **arguments,
            "channels": channels,
            "extra_blocks": arguments.get("extra_blocks", 0) + depth,
        }
        if (waist := arguments.get("waist")) is not None:
            changed["waist"] = min(round_half_up(waist * width), channels << _middle(arguments["blocks"]))
        return changed

    def flops(self, shape: Sequence[int]) -> list[Flops]:
        """FLOPs of each segment; `shape` is that of an image: [3, height, width]."""
        _, height, width = shape
        costs: list[Flops] = []
        for segment in self.segments:
            cost = Flops()
            for layer in segment.modules():
                if isinstance(layer, nn.Conv2d):
                    sizes = layer.in_channels, layer.out_channels, layer.kernel_size[0]
                    cost += conv_flops(*sizes, height * width, layer.groups)
                elif isinstance(layer, nn.AvgPool2d):
                    height, width = height // self.shrink, width // self.shrink
                elif isinstance(layer, nn.MaxPool2d):
                    height, width = height // 2, width // 2
                elif isinstance(layer, nn.Linear):
                    cost += linear_flops(layer.in_features, layer.out_features)
            costs.append(cost)
        return [replace(costs[0], input_grad=0), *costs[1:]]  # images need no gradient


def _check_waist(waist: int, channels: int, mixing: bool) -> None:
    """Refuse a waist that is wider than the features of its block, and one in a host that must not mix channels."""
    if not 1 <= waist <= channels:
        raise ValueError(
            f"host.waist={waist}: must be from 1 to {channels}, the channels of the middle block, or null."
        )
    if not mixing:
        raise ValueError(f"host.waist={waist}: must be null with host.mixing=false, because a waist mixes channels.")
