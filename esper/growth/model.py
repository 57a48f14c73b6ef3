"""A host with seeds in its slots."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from esper.growth.modes import Mode, SeedSetting, SeedSettings, run_seed
from esper.growth.seed import Seed, make_seed
from esper.hosts import Host
from esper.lifecycle import Blend


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
        new = make_seed(topology, blueprint, blend, channels, rng_seed=rng_seed, init=init)
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
                x = self._run_seed(name, self.host.run(x, at, name), setting)
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

    def _run_seed(self, slot: str, h: Tensor, setting: SeedSetting) -> Tensor:
        return run_seed(self.seed(slot), h, setting.mode, setting.alpha, coadapt=self.coadapt)


def _mode(settings: SeedSettings, slot: str) -> Mode | None:
    return settings[slot].mode if slot in settings else None
