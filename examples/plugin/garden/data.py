"""A data set of one's own: images as bytes, and their classes."""

from typing import Unpack

import torch

from esper.data import ImageData, ImageOptions, Labelled
from esper.rng import make_generator

SIDE, CLASSES = 32, 10


def slopes(*, count: int, **options: Unpack[ImageOptions]) -> ImageData:
    """Gradients of light in ten directions, under noise."""
    return ImageData(
        name="slopes", known=_drawn(count, 0), unseen=_drawn(count // 4, 1), mean=(0.5,) * 3, std=(0.25,) * 3, **options
    )


def _drawn(count: int, part: int) -> Labelled:
    draws = make_generator("slopes", part)
    labels = torch.arange(count) % CLASSES
    angle = labels[:, None, None] * (2 * torch.pi / CLASSES)
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij")
    light = 0.5 + 0.2 * (angle.cos() * x + angle.sin() * y)
    noisy = light[..., None] + 0.2 * torch.randn(count, SIDE, SIDE, 3, generator=draws)
    return Labelled((255 * noisy.clamp(0, 1)).to(torch.uint8), labels)
