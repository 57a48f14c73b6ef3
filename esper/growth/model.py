"""A host with seeds in its slots."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.blueprints import blueprint as find_blueprint
from esper.blueprints.layers import randomise_zero_layers
from esper.growth.seed import Seed
from esper.hosts import Host
from esper.lifecycle import Blend, Slots, Stage
from esper.rng import seeded_init


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


class GrowingHost(nn.Module):
    """A host and the seeds in its slots.

    Arguments:
        host: the network that is grown
        coadapt: whether a blended seed's gradient also reaches the host's earlier layers. If not, they always train as
            if the seed were absent.
    """

    def __init__(self, host: Host, *, coadapt: bool) -> None:
        super().__init__()
        self.host = host
        self.coadapt = coadapt
        self.seeds = nn.ModuleDict()

    def graft(
        self,
        slot: str,
        blueprint: str,
        blend: Blend,
        *,
        rng_seed: int,
        init: Literal["identity", "random"] = "identity",
    ) -> Seed:
        """Put a new seed into an empty slot; its initial weights follow from `rng_seed`. Main thread only.

        With `init` random, layers that the blueprint sets to zero have random weights instead, so the new seed is not
        the identity; all other weights are the same. A seed without such a layer (norm) is the identity still.
        """
        channels = self.host.slot(slot).channels
        if slot in self.seeds:
            raise ValueError(f"slot={slot}: must be empty, but has a seed; remove it first.")
        topology = self.host.topology
        with seeded_init(rng_seed):
            body = find_blueprint(topology, blueprint).build(channels)
            new = Seed(body, blueprint=blueprint, blend=blend, channels=channels, topology=topology)
            if init == "random":
                randomise_zero_layers(body)
        new.to(next(self.host.parameters()).device)
        if topology == "cnn":
            new.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
        new.train(self.training)
        self.seeds[slot] = new
        return new

    def remove(self, slot: str) -> None:
        """Remove the seed of a slot."""
        if slot not in self.seeds:
            raise ValueError(f"slot={slot}: must have a seed, but is empty.")
        del self.seeds[slot]

    def seed(self, slot: str) -> Seed:
        """The seed in a slot."""
        seed = self.seeds[slot]
        assert isinstance(seed, Seed)
        return seed

    def forward(self, x: Tensor, settings: SeedSettings, start: str | None = None, stop: str | None = None) -> Tensor:
        """Run the host with its seeds as `settings` states; isolated seeds are not in the output.

        With `start`, x is the features at that slot, before its seed. With `stop`, the result is the features at that
        slot, before its seed. So a run can resume from cached features with a seed switched on or off.
        """
        at = start
        for name in self._slots(start, stop):
            setting = settings.get(name)
            if name in self.seeds and setting is not None and setting.mode is not Mode.ISOLATED:
                x = self._run_seed(self.seed(name), self.host.run(x, at, name), setting)
                at = name
        return self.host.run(x, at, stop)

    def losses(
        self, x: Tensor, settings: SeedSettings, criterion: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The host's loss, and the loss of each isolated seed by slot; the gradient of their sum trains host and seeds.

        The loss of an isolated seed is that of the network with the seed blended in at its target alpha: from the
        detached features at its slot, the rest of the network runs again with all weights but the seed's frozen,
        without dropout, and on copies of running statistics. So the host's values, gradients and dropout are bit-equal
        to those without the seed, even if the seed is non-finite, and the seed gets the gradient of its own effect.
        """
        isolated = [name for name in self._slots() if name in self.seeds and _mode(settings, name) is Mode.ISOLATED]
        features: dict[str, Tensor] = {}
        at = None
        for name in isolated:
            x = self(x, settings, at, name)
            features[name] = x.detach()
            at = name
        host_loss = criterion(self(x, settings, at))
        return host_loss, {name: criterion(self._run_as_blended(name, h, settings)) for name, h in features.items()}

    def _run_as_blended(self, slot: str, h: Tensor, settings: SeedSettings) -> Tensor:
        """The output with the seed in `slot` blended in at its target alpha; only that seed gets a gradient."""
        own = f"seeds.{slot}."
        frozen = {name: p.detach() for name, p in self.named_parameters() if not name.startswith(own)}
        frozen |= {name: buffer.clone() for name, buffer in self.named_buffers()}
        blended = {**settings, slot: SeedSetting(Mode.BLENDED, settings[slot].alpha)}
        with self.host.without_dropout():
            out: Tensor = functional_call(self, frozen, (h, blended, slot))
        return out

    def _slots(self, start: str | None = None, stop: str | None = None) -> list[str]:
        """The slots from `start` up to, but without, `stop`."""
        names = [slot.name for slot in self.host.slots]
        first = 0 if start is None else names.index(self.host.slot(start).name)
        last = len(names) if stop is None else names.index(self.host.slot(stop).name)
        return names[first:last]

    def _run_seed(self, seed: Seed, h: Tensor, setting: SeedSetting) -> Tensor:
        """The features h after a seed that is in the output."""
        inputs = h if self.coadapt else h.detach()
        if setting.mode is Mode.FADING:
            frozen = {name: parameter.detach() for name, parameter in seed.named_parameters()}
            out: Tensor = functional_call(seed, frozen, (inputs, setting.alpha))
        else:
            out = seed(inputs, setting.alpha)
        if self.coadapt:
            return out
        result: Tensor = _StraightThrough.apply(h, out)  # type: ignore[no-untyped-call]
        return result


def _mode(settings: SeedSettings, slot: str) -> Mode | None:
    return settings[slot].mode if slot in settings else None
