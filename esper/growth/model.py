"""A host with its seeds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.blueprints import blueprint as find_blueprint
from esper.growth.seed import Seed
from esper.hosts import Host
from esper.lifecycle import Blend, Slots, Stage
from esper.rng import seeded_init


class Mode(Enum):
    """What part a seed plays in a forward pass."""

    ISOLATED = "behind"  # takes no part, but trains as if it did at its target alpha; the host does not notice
    BLENDED = "blended"  # takes part at its alpha, and trains
    FADING = "fading"  # takes part at its alpha, and trains no more; the host's gradient still passes through it


@dataclass(frozen=True)
class SeedSetting:
    """A seed's mode and alpha; the alpha of a seed behind the host is the one it will be blended at."""

    mode: Mode
    alpha: float


SeedSettings = Mapping[str, SeedSetting]  # by slot; a seed without a setting is switched off


def seed_settings(slots: Slots, env: int, names: tuple[str, ...]) -> dict[str, SeedSetting]:
    """How the seeds of one environment take part in the coming epoch; `names` are the slots in their columns' order."""
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
    """How the fossils of one environment take part; no other seed does."""
    fossils = (slots.stage[env] == Stage.FOSSILIZED).tolist()
    every = seed_settings(slots, env, names)
    return {name: every[name] for name, fossil in zip(names, fossils, strict=True) if fossil}


class _Isolated(torch.autograd.Function):
    """Passes on the seed's output; the gradient at the slot goes to the seed, and unchanged to the host before it."""

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
        coadapt: whether a blended seed's gradient also reaches the host's earlier layers. If not, they are trained as
            if the seed were not there, for good.
    """

    def __init__(self, host: Host, *, coadapt: bool) -> None:
        super().__init__()
        self.host = host
        self.coadapt = coadapt
        self.seeds = nn.ModuleDict()

    def graft(self, slot: str, blueprint: str, blend: Blend, *, rng_seed: int) -> Seed:
        """Put a new seed into an empty slot; its initial weights follow from `rng_seed`. Call it in the main thread."""
        channels = self.host.slot(slot).channels
        if slot in self.seeds:
            raise ValueError(f"slot {slot} holds a seed already; remove it first.")
        topology = self.host.topology
        with seeded_init(rng_seed):
            body = find_blueprint(topology, blueprint).build(channels)
            new = Seed(body, blueprint=blueprint, blend=blend, channels=channels, topology=topology)
        new.to(next(self.host.parameters()).device)
        if topology == "cnn":
            new.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
        new.train(self.training)
        self.seeds[slot] = new
        return new

    def remove(self, slot: str) -> None:
        """Take the seed out of a slot."""
        if slot not in self.seeds:
            raise ValueError(f"slot {slot} holds no seed.")
        del self.seeds[slot]

    def seed(self, slot: str) -> Seed:
        found = self.seeds[slot]
        assert isinstance(found, Seed)
        return found

    def forward(self, x: Tensor, settings: SeedSettings, start: str | None = None, stop: str | None = None) -> Tensor:
        """Run the host with its seeds as `settings` has them; seeds behind the host take no part.

        From `start`, x is the features that arrive at that slot, before its seed; at `stop`, the result is likewise
        the features before that slot's seed. So a cached prefix can be continued with a seed switched on or off.
        """
        at = start
        for name in self._slots(start, stop):
            setting = settings.get(name)
            if name in self.seeds and setting is not None and setting.mode is not Mode.ISOLATED:
                x = self._through(self.seed(name), self.host.run(x, at, name), setting)
                at = name
        return self.host.run(x, at, stop)

    def losses(
        self, x: Tensor, settings: SeedSettings, criterion: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The host's loss, and the loss of each seed behind it, by slot; the gradient of their sum trains them all.

        A seed behind the host is trained on what the loss would be with it blended in at its target alpha: from the
        detached features at its slot, the rest of the network is run once more with every weight but the seed's held
        fixed, without dropout, and on copies of running statistics. So the host's values, gradients and noise are
        bit-equal to those without the seed, even if it is not finite, and yet the seed feels how far it should go.
        """
        behind = [name for name in self._slots() if name in self.seeds and _mode(settings, name) is Mode.ISOLATED]
        features: dict[str, Tensor] = {}
        at = None
        for name in behind:
            x = self(x, settings, at, name)
            features[name] = x.detach()
            at = name
        host = criterion(self(x, settings, at))
        return host, {name: criterion(self._as_if_blended(name, h, settings)) for name, h in features.items()}

    def _as_if_blended(self, slot: str, h: Tensor, settings: SeedSettings) -> Tensor:
        """The output with the seed in `slot` blended in at its target alpha; only that seed can feel it."""
        own = f"seeds.{slot}."
        held = {name: p.detach() for name, p in self.named_parameters() if not name.startswith(own)}
        held |= {name: buffer.clone() for name, buffer in self.named_buffers()}
        blended = {**settings, slot: SeedSetting(Mode.BLENDED, settings[slot].alpha)}
        with self.host.without_dropout():
            out: Tensor = functional_call(self, held, (h, blended, slot))
        return out

    def _slots(self, start: str | None = None, stop: str | None = None) -> list[str]:
        """The slots from `start` on, up to but without `stop`."""
        names = [slot.name for slot in self.host.slots]
        first = 0 if start is None else names.index(self.host.slot(start).name)
        last = len(names) if stop is None else names.index(self.host.slot(stop).name)
        return names[first:last]

    def _through(self, seed: Seed, h: Tensor, setting: SeedSetting) -> Tensor:
        inputs = h if self.coadapt else h.detach()
        if setting.mode is Mode.FADING:
            frozen = {name: parameter.detach() for name, parameter in seed.named_parameters()}
            out: Tensor = functional_call(seed, frozen, (inputs, setting.alpha))
        else:
            out = seed(inputs, setting.alpha)
        if self.coadapt:
            return out
        isolated: Tensor = _Isolated.apply(h, out)  # type: ignore[no-untyped-call]
        return isolated


def _mode(settings: SeedSettings, slot: str) -> Mode | None:
    return settings[slot].mode if slot in settings else None
