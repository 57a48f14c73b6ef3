"""What a host with its seeds costs per sample, forward, in training and in probes."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from esper.blueprints import blueprint
from esper.flops import Flops, symmetric_flops
from esper.growth import Mode, SeedSettings
from esper.growth.seed import BlendGate
from esper.hosts import Host
from esper.lifecycle import Blend


class HostCosts:
    """FLOPs per sample of a host's segments and of its seeds: as they state them, or else counted on the meta device.

    `seeds` are always the costs of those that are there, by slot.
    """

    def __init__(self, build: Callable[[], Host], example: Tensor) -> None:
        """`example` is one sample, [1, ...], on any device."""
        with torch.device("meta"):
            self._host = build().eval()
        x = example.to("meta")
        stated = self._host.flops(x.shape[1:])
        self.slots = tuple(slot.name for slot in self._host.slots)
        self._features: dict[str, Tensor] = {}
        self._seeds: dict[tuple[str, str, Blend], Flops] = {}
        counted: list[Flops] = []
        for start, stop in zip((None, *self.slots), (*self.slots, None), strict=True):
            cost, x = _count(self._host.run, x, start, stop)
            counted.append(cost)
            if stop is not None:
                self._features[stop] = x
        self.segments = counted if stated is None else stated

    def seed(self, slot: str, name: str, blend: Blend) -> Flops:
        """The seed of a blueprint in a slot, with what blends it in."""
        key = (slot, name, blend)
        if key not in self._seeds:
            topology, channels = self._host.topology, self._host.slot(slot).channels
            positions = self._features[slot].numel() // channels
            entry = blueprint(topology, name)
            if entry.flops is not None:
                body = entry.flops(channels, positions)
            else:
                with torch.device("meta"):
                    built = entry.build(channels).eval()
                body, _ = _count(built, self._features[slot])
            gate = BlendGate.flops(channels, topology, positions) if blend is Blend.GATED else Flops()
            self._seeds[key] = body + gate
        return self._seeds[key]

    def forward(self, seeds: Mapping[str, Flops], settings: SeedSettings, start: str | None = None) -> int:
        """One sample through the network from a slot on, its own seed included."""
        return sum(cost.forward for cost, _ in self._parts(seeds, settings, start))

    def train(self, seeds: Mapping[str, Flops], settings: SeedSettings) -> int:
        """One sample forward and backward through the host and the seeds blended into it.

        Where blended seeds send no gradient back to the host (`coadapt` off), this is a little more than is done: it
        has the gradient towards a seed's inputs all the same, and that through a fading seed.
        """
        return sum(cost.total if learns else cost.frozen for cost, learns in self._parts(seeds, settings))

    def isolated(self, seeds: Mapping[str, Flops], settings: SeedSettings) -> int:
        """One sample's second passes, that of each seed behind the host: the seed, and all that follows held fixed.

        The gradient of a seed's first layer towards its inputs is included, though where no normalisation stands
        before that layer it is not taken.
        """
        behind = [name for name, setting in settings.items() if setting.mode is Mode.ISOLATED]
        following = (cost.frozen for name in behind for cost, _ in self._parts(seeds, settings, name))
        return sum(seeds[name].total for name in behind) + sum(following)

    def probe(self, seeds: Mapping[str, Flops], settings: SeedSettings, off: Collection[str]) -> int:
        """One sample for each slot in `off`, from that slot on with its seed switched off."""
        return sum(self.forward(seeds, settings, name) - seeds[name].forward for name in off)

    def _parts(
        self, seeds: Mapping[str, Flops], settings: SeedSettings, start: str | None = None
    ) -> list[tuple[Flops, bool]]:
        """The segments and seeds that a sample passes from a slot on, each with whether its weights learn from it."""
        first = 0 if start is None else self.slots.index(start)
        segments = self.segments[0 if start is None else first + 1 :]
        modes = {name: settings[name].mode for name in self.slots[first:] if name in settings}
        passed = [(seeds[name], mode is Mode.BLENDED) for name, mode in modes.items() if mode is not Mode.ISOLATED]
        return [(cost, True) for cost in segments] + passed


def _count(run: Callable[..., Tensor], *arguments: object) -> tuple[Flops, Tensor]:
    """The cost by torch's count of a forward pass, and what it gave."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        out = run(*arguments)
    return symmetric_flops(int(counter.get_total_flops())), out
