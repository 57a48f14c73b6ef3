"""How seeds take part in a forward pass: the same in a `GrowingHost` and behind a module of any network."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.func import functional_call

from esper.growth.seed import Alpha, Seed
from esper.lifecycle import Slots, Stage


class Mode(Enum):
    """How a seed takes part in a forward pass."""

    ISOLATED = "isolated"  # not in the output; trains as if blended at its target alpha, without effect on the host
    BLENDED = "blended"  # in the output at its alpha; trains
    FADING = "fading"  # in the output at its alpha; frozen, but the host's gradient passes through it


@dataclass(frozen=True)
class SeedSetting:
    """A seed's mode and alpha; the alpha of an isolated seed is its target alpha."""

    mode: Mode
    alpha: float


SeedSettings = Mapping[str, SeedSetting]  # by slot; a seed without a setting is switched off


def seed_settings(slots: Slots, env: int, names: tuple[str, ...]) -> dict[str, SeedSetting]:
    """The settings of one environment's seeds for the next step; `names` are the slots in the order of the columns."""
    stages, alphas, targets = (field[env].tolist() for field in (slots.stage, slots.alpha, slots.alpha_target))
    result = {}
    for name, stage, alpha, target in zip(names, stages, alphas, targets, strict=True):
        if stage == Stage.TRAINING:
            result[name] = SeedSetting(Mode.ISOLATED, target)
        elif stage == Stage.BLENDING and target == 0:
            result[name] = SeedSetting(Mode.FADING, alpha)
        elif stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED):
            result[name] = SeedSetting(Mode.BLENDED, alpha)
    return result


def fossil_settings(slots: Slots, env: int, names: tuple[str, ...]) -> dict[str, SeedSetting]:
    """The settings of one environment's fossils only, so that every other seed is switched off."""
    fossils = (slots.stage[env] == Stage.FOSSILIZED).tolist()
    settings = seed_settings(slots, env, names)
    return {name: settings[name] for name, is_fossil in zip(names, fossils, strict=True) if is_fossil}


class _StraightThrough(torch.autograd.Function):
    """Returns the seed's output; passes the gradient at the slot to the seed, and unchanged to the host before it."""

    @staticmethod
    def forward(ctx: object, host: Tensor, seed: Tensor) -> Tensor:
        return seed.view_as(seed)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


class _Isolated(torch.autograd.Function):
    """Returns the host's features; passes their gradient to the seed's output too, and unchanged to the host."""

    @staticmethod
    def forward(ctx: object, host: Tensor, seed: Tensor) -> Tensor:
        return host.clone()  # a view may not be changed in place, as many networks do with the features

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


def run_seed(seed: Seed, h: Tensor, mode: Mode, alpha: Alpha, *, coadapt: bool) -> Tensor:
    """The features h after a seed.

    An isolated seed does not change them: it reads them detached, and gets the gradient that arrives at the slot, as if
    it were blended in at its target alpha. Values and gradients of the host are bit-equal to those without the seed.
    With `coadapt`, the gradient of a blended or fading seed also reaches the layers before it; otherwise they train as
    if the seed were absent.
    """
    if mode is Mode.ISOLATED:
        if not torch.is_grad_enabled():
            return h
        isolated: Tensor = _Isolated.apply(h, seed(h.detach(), alpha))  # type: ignore[no-untyped-call]
        return isolated
    inputs = h if coadapt else h.detach()
    if mode is Mode.FADING:
        frozen = {name: parameter.detach() for name, parameter in seed.named_parameters()}
        out: Tensor = functional_call(seed, frozen, (inputs, alpha))
    else:
        out = seed(inputs, alpha)
    if coadapt:
        return out
    result: Tensor = _StraightThrough.apply(h, out)  # type: ignore[no-untyped-call]
    return result
