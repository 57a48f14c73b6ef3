"""A custom data set: images as bytes, and their classes."""

from typing import Unpack

import torch

from esper.data import ImageData, ImageOptions, Labelled
from esper.rng import make_generator

SIDE, CLASSES = 32, 10


def custom_data(*, count: int, **options: Unpack[ImageOptions]) -> ImageData:
    """Brightness gradients in ten directions, with noise.

    Arguments:
        count: images to train and validate on; a quarter as many are made to test on
    """
    known, unseen = _make_images(count, part=0), _make_images(count // 4, part=1)
    return ImageData(
        name="custom_data", known=known, unseen=unseen, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), **options
    )


def _make_images(count: int, part: int) -> Labelled:
    generator = make_generator("custom_data", part)
    labels = torch.arange(count) % CLASSES
    angle = labels[:, None, None] * (2 * torch.pi / CLASSES)
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij")
    brightness = 0.5 + 0.2 * (angle.cos() * x + angle.sin() * y)
    noisy = brightness[..., None] + 0.2 * torch.randn(count, SIDE, SIDE, 3, generator=generator)
    return Labelled((255 * noisy.clamp(0, 1)).to(torch.uint8), labels)
