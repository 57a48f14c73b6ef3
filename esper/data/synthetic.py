"""Data that needs no files: images whose classes are textures, and stories from a small grammar.

Both follow from a fixed seed. Neither is trivial: the images need spatial filters, for their colours say nothing of the
class; the stories need memory, for who does what was told sentences before.
"""

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

KNOWN, UNSEEN = (
    12_000,
    2_000,
)  # images there are to train and validate on, and to test on; more where more are asked for
STORIES_KNOWN, STORIES_UNSEEN = 6_000, 600
WIDE, NARROW = 10.0, 5.0  # pixels of a period
NOISE = 0.25  # standard deviation of each pixel, on the scale 0 to 1
MEAN, STD = (0.5, 0.5, 0.5), (0.3, 0.3, 0.3)


class _Canvas:
    """Patterns in [-1, 1] for `count` images, [count, side, side]; phase, period and centre are drawn for each."""

    def __init__(self, count: int, draws: torch.Generator) -> None:
        self._count, self._draws = count, draws
        place = torch.arange(SIDE, dtype=torch.float32)
        self._y, self._x = place[:, None].expand(SIDE, SIDE), place.expand(SIDE, SIDE)

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
        coarse = torch.randn(self._count, 1, 8, 8, generator=self._draws)
        return torch.tanh(F.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic")[:, 0])

    def _wave(self, place: Tensor, period: float) -> Tensor:
        return torch.sin(2 * math.pi / period * self._draw(0.9, 1.1) * place + self._draw(0, 2 * math.pi))

    def _draw(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self._count, 1, 1, generator=self._draws)


TEXTURES: dict[str, Callable[[_Canvas], Tensor]] = {  # a class each; none turns into another when mirrored
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
    """Ten classes of textures, 32x32x3."""
    known = _drawn("known", max(KNOWN, (options["train"] or 0) + options["validation"]))
    unseen = _drawn("unseen", max(UNSEEN, options["test"]))
    return ImageData(name="synthetic_images", known=known, unseen=unseen, mean=MEAN, std=STD, **options)


@cache
def _drawn(purpose: str, count: int) -> Labelled:
    draws = make_generator(f"synthetic images, {purpose}", 0)
    each = math.ceil(count / len(TEXTURES))
    canvas = _Canvas(each, draws)
    parts = []
    for texture in TEXTURES.values():
        one, other = torch.rand(2, each, 1, 1, 3, generator=draws)  # two colours, which say nothing of the class
        contrast = 0.25 + 0.5 * torch.rand(each, 1, 1, 1, generator=draws)
        pixels = (one + other) / 2 + contrast * (one - other) * texture(canvas)[..., None]
        pixels += NOISE * torch.randn(each, SIDE, SIDE, 3, generator=draws)
        parts.append((pixels.clamp_(0, 1) * 255).round_().to(torch.uint8))
    return Labelled(torch.cat(parts), torch.arange(len(TEXTURES)).repeat_interleave(each))


def stories(**options: Unpack[TextOptions]) -> TextData:
    """Short stories of a few dozen words' vocabulary."""
    known, unseen = _told("known", STORIES_KNOWN), _told("unseen", STORIES_UNSEEN)  # sizes are "at most"
    return TextData(name="synthetic_stories", known=known, unseen=unseen, cache=None, **options)


def _told(purpose: str, count: int) -> list[str]:
    choice = random.Random(derive_seed(f"synthetic stories, {purpose}", 0))
    return [_story(choice) for _ in range(count)]


_GIRLS = ("Ada", "Mia", "Zoe", "Lily", "Nora", "Ruth")
_BOYS = ("Ben", "Tom", "Max", "Leo", "Finn", "Sam")
_ANIMALS = ("dog", "cat", "bird", "frog", "bear", "fox", "duck", "mouse")
_THINGS = ("ball", "kite", "boat", "drum", "book", "hat", "cake", "stone", "bell", "cup")
_COLOURS = ("red", "blue", "green", "yellow", "white", "black")
_PLACES = ("park", "garden", "forest", "kitchen", "river", "hill", "school", "barn")
_FEELINGS = {"lost": ("sad", "found"), "broke": ("angry", "fixed"), "hid": ("worried", "brought back")}


def _story(choice: random.Random) -> str:
    hero = choice.choice(_GIRLS + _BOYS)
    she, her = ("she", "her") if hero in _GIRLS else ("he", "his")
    friend = choice.choice(_ANIMALS)
    colour, thing = choice.choice(_COLOURS), choice.choice(_THINGS)
    place, other_place = choice.sample(_PLACES, 2)
    trouble = choice.choice(tuple(_FEELINGS))
    feeling, remedy = _FEELINGS[trouble]
    openings = (f"Once there was a child, {hero}.", f"{hero} lived near the {other_place}.", f"{hero} woke up early.")
    opening = choice.choice(openings)
    lines = [
        f"{opening} {she.capitalize()} had a {colour} {thing} and a friend, the {friend}.",
        f"{hero} and the {friend} took the {thing} to the {place}.",
    ]
    for _ in range(choice.randint(0, 3)):
        lines.append(
            choice.choice(
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
    lines.append(choice.choice((f"{hero} thanked the {friend}.", f"Then {hero} and the {friend} went home.")))
    return "\n".join(lines)
