"""A convolutional classifier, in channels_last."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from esper.arguments import LayerCount
from esper.flops import Flops, conv_flops, linear_flops
from esper.hosts.host import Host, Slot, require_positive, round_half_up


class ChannelsLast(nn.Module):
    """Converts images to channels_last, the memory format in which convolutions are fastest."""

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last)


class GlobalMean(nn.Module):
    """Mean over space: [batch, channels, height, width] -> [batch, channels]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def _block(inputs: int, outputs: int, kernel: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


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
        segments: list[nn.Module] = []
        slots: list[Slot] = []
        pending: list[nn.Module] = [nn.AvgPool2d(shrink), ChannelsLast()] if shrink > 1 else [ChannelsLast()]

        def end_segment(slot: str, channels: int) -> None:
            segments.append(nn.Sequential(*pending))
            slots.append(Slot(slot, channels))
            pending.clear()

        inputs = 3
        for index in range(blocks):
            outputs = channels << index
            pending += _block(inputs, outputs, kernel)
            end_segment(f"block{index + 1}", outputs)
            for _ in range(extra_blocks if index == blocks - 1 else 0):
                pending += _block(outputs, outputs, kernel)
            if index < pools:
                pending.append(nn.MaxPool2d(2))
                if pool_slots:
                    end_segment(f"pool{index + 1}", outputs)
            inputs = outputs
        segments.append(nn.Sequential(*pending, GlobalMean(), nn.Linear(inputs, classes)))
        super().__init__(segments, slots)
        self.shrink = shrink
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs

    @classmethod
    def variant_arguments(cls, arguments: Mapping[str, Any], *, width: float, depth: int) -> dict[str, Any]:
        """Channels times `width`, and `depth` further blocks of the last width."""
        return {
            **arguments,
            "channels": round_half_up(arguments["channels"] * width),
            "extra_blocks": arguments.get("extra_blocks", 0) + depth,
        }

    def flops(self, shape: Sequence[int]) -> list[Flops]:
        """FLOPs of each segment; `shape` is that of an image: [3, height, width]."""
        _, height, width = shape
        costs: list[Flops] = []
        for segment in self.segments:
            cost = Flops()
            for layer in segment.modules():
                if isinstance(layer, nn.Conv2d):
                    cost += conv_flops(layer.in_channels, layer.out_channels, layer.kernel_size[0], height * width)
                elif isinstance(layer, nn.AvgPool2d):
                    height, width = height // self.shrink, width // self.shrink
                elif isinstance(layer, nn.MaxPool2d):
                    height, width = height // 2, width // 2
                elif isinstance(layer, nn.Linear):
                    cost += linear_flops(layer.in_features, layer.out_features)
            costs.append(cost)
        return [replace(costs[0], input_grad=0), *costs[1:]]  # images need no gradient
