"""Synthetic data, without files: images whose classes are textures, and stories from a small grammar.

Both follow from a fixed random seed. Neither is trivial: the images need spatial filters, because their colours are
independent of the class; the stories need memory, because who does what follows from earlier sentences.
"""

import logging
import math
import random
from collections.abc import Callable
from functools import cache
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.data.images import SIDE, ImageData, ImageOptions, Labelled
from esper.data.text import TextData, TextOptions
from esper.rng import derive_seed, make_generator

KNOWN, UNSEEN = 12_000, 2_000  # minimum number of images for training and validation, and for test
STORIES_KNOWN, STORIES_UNSEEN = 6_000, 600  # fixed, because the sizes of TextOptions are maxima
WIDE, NARROW = 10.0, 5.0  # periods, in pixels
NOISE = 0.25  # standard deviation of each pixel, on the scale 0 to 1
SYNTHETIC_MEAN, SYNTHETIC_STD = (0.5, 0.5, 0.5), (0.3, 0.3, 0.3)

log = logging.getLogger(__name__)


class _Canvas:
    """Random patterns in [-1, 1], [count, side, side]; phase, period and centre differ between the images."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self._count, self._generator = count, generator
        pixel = torch.arange(SIDE, dtype=torch.float32)
        self._y, self._x = pixel[:, None].expand(SIDE, SIDE), pixel.expand(SIDE, SIDE)

    def rows(self, period: float) -> Tensor:
        return self._wave(self._y, period)

    def columns(self, period: float) -> Tensor:
        return self._wave(self._x, period)

    def checks(self, period: float) -> Tensor:
        return self.rows(period) * self.columns(period)

    def plaid(self, period: float) -> Tensor:
        return (self.rows(period) + self.columns(period)) / 2

    def rings(self, period: float) -> Tensor:
        down, across = self._y - self._draw(8, 24), self._x - self._draw(8, 24)
        return self._wave(torch.hypot(down, across), period)

    def clouds(self) -> Tensor:
        coarse = torch.randn(self._count, 1, 8, 8, generator=self._generator)
        return torch.tanh(F.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic")[:, 0])

    def _wave(self, position: Tensor, period: float) -> Tensor:
        return torch.sin(2 * math.pi / period * self._draw(0.9, 1.1) * position + self._draw(0, 2 * math.pi))

    def _draw(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self._count, 1, 1, generator=self._generator)


TEXTURES: dict[str, Callable[[_Canvas], Tensor]] = {  # one per class; flipping an image does not change its class
    "wide rows": lambda canvas: canvas.rows(WIDE),
    "narrow rows": lambda canvas: canvas.rows(NARROW),
    "wide columns": lambda canvas: canvas.columns(WIDE),
    "narrow columns": lambda canvas: canvas.columns(NARROW),
    "wide checks": lambda canvas: canvas.checks(WIDE),
    "narrow checks": lambda canvas: canvas.checks(NARROW),
    "wide plaid": lambda canvas: canvas.plaid(WIDE),
    "narrow plaid": lambda canvas: canvas.plaid(NARROW),
    "rings": lambda canvas: canvas.rings(WIDE),
    "clouds": lambda canvas: canvas.clouds(),
}


def images(**options: Unpack[ImageOptions]) -> ImageData:
    """Synthetic images: ten classes of textures, 32x32x3. The arguments are those of esper.data.ImageOptions."""
    known = _make_images("known", max(KNOWN, (options["train"] or 0) + options["validation"]))
    unseen = _make_images("unseen", max(UNSEEN, options["test"]))
    return ImageData(
        name="synthetic_images", known=known, unseen=unseen, mean=SYNTHETIC_MEAN, std=SYNTHETIC_STD, **options
    )


def images_instead_of(title: str, error: Exception, **options: Unpack[ImageOptions]) -> ImageData:
    """Synthetic images, with a warning, in place of a data set that cannot be loaded because of an error."""
    log.warning("%s Using SYNTHETIC IMAGES instead (data.fallback=true); results are not on %s.", error, title)
    return images(**options)


@cache
def _make_images(purpose: str, count: int) -> Labelled:
    generator = make_generator(f"synthetic images, {purpose}", 0)
    per_class = math.ceil(count / len(TEXTURES))
    canvas = _Canvas(per_class, generator)
    parts = []
    for texture in TEXTURES.values():
        first, second = torch.rand(2, per_class, 1, 1, 3, generator=generator)  # colours, independent of the class
        contrast = 0.25 + 0.5 * torch.rand(per_class, 1, 1, 1, generator=generator)
        pixels = (first + second) / 2 + contrast * (first - second) * texture(canvas)[..., None]
        pixels += NOISE * torch.randn(per_class, SIDE, SIDE, 3, generator=generator)
        parts.append((pixels.clamp_(0, 1) * 255).round_().to(torch.uint8))
    return Labelled(torch.cat(parts), torch.arange(len(TEXTURES)).repeat_interleave(per_class))


def stories(**options: Unpack[TextOptions]) -> TextData:
    """Synthetic stories from a few dozen words. The arguments are those of esper.data.text.TextOptions."""
    known, unseen = _make_stories("known", STORIES_KNOWN), _make_stories("unseen", STORIES_UNSEEN)
    return TextData(name="synthetic_stories", known=known, unseen=unseen, cache=None, **options)


def _make_stories(purpose: str, count: int) -> list[str]:
    rng = random.Random(derive_seed(f"synthetic stories, {purpose}", 0))
    return [_make_story(rng) for _ in range(count)]


_GIRLS = ("Ada", "Mia", "Zoe", "Lily", "Nora", "Ruth")
_BOYS = ("Ben", "Tom", "Max", "Leo", "Finn", "Sam")
_ANIMALS = ("dog", "cat", "bird", "frog", "bear", "fox", "duck", "mouse")
_THINGS = ("ball", "kite", "boat", "drum", "book", "hat", "cake", "stone", "bell", "cup")
_COLOURS = ("red", "blue", "green", "yellow", "white", "black")
_PLACES = ("park", "garden", "forest", "kitchen", "river", "hill", "school", "barn")
_FEELINGS = {"lost": ("sad", "found"), "broke": ("angry", "fixed"), "hid": ("worried", "brought back")}


def _make_story(rng: random.Random) -> str:
    hero = rng.choice(_GIRLS + _BOYS)
    she, her = ("she", "her") if hero in _GIRLS else ("he", "his")
    friend = rng.choice(_ANIMALS)
    colour, thing = rng.choice(_COLOURS), rng.choice(_THINGS)
    place, other_place = rng.sample(_PLACES, 2)
    trouble = rng.choice(tuple(_FEELINGS))
    feeling, remedy = _FEELINGS[trouble]
    openings = (f"Once there was a child, {hero}.", f"{hero} lived near the {other_place}.", f"{hero} woke up early.")
    opening = rng.choice(openings)
    lines = [
        f"{opening} {she.capitalize()} had a {colour} {thing} and a friend, the {friend}.",
        f"{hero} and the {friend} took the {thing} to the {place}.",
    ]
    for _ in range(rng.randint(0, 3)):
        lines.append(
            rng.choice(
                (
                    f'"Look at my {thing}," said {hero}.',
                    f"The {friend} liked the {colour} {thing}.",
                    f"They played in the {place} all day.",
                    f"{she.capitalize()} was happy.",
                )
            )
        )
    lines.append(f"But at the {place}, {hero} {trouble} {her} {thing}. {she.capitalize()} was {feeling}.")
    lines.append(f"The {friend} {remedy} the {colour} {thing}, and {hero} was not {feeling} any more.")
    lines.append(rng.choice((f"{hero} thanked the {friend}.", f"Then {hero} and the {friend} went home.")))
    return "\n".join(lines)
