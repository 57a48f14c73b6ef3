"""What a forward pass costs, per sample, and what a step of training and measuring adds up to."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from esper.blueprints import blueprint
from esper.growth import Mode, Seed, Settings
from esper.hosts import Host
from esper.lifecycle import Blend

FORWARD_AND_BACKWARD = 3  # a backward pass costs two forward passes: one for the inputs', one for the weights' gradient
FORWARD_AND_INPUTS = 2  # where no weight is trained, half of the backward pass falls away


class Costs:
    """Forward FLOPs per sample of a host's segments and of its seeds, counted on the meta device."""

    def __init__(self, build: Callable[[], Host], example: Tensor) -> None:
        """`example` is one sample, [1, ...], on any device."""
        with torch.device("meta"):
            self._host = build().eval()
        x = example.to("meta")
        self.slots = tuple(slot.name for slot in self._host.slots)
        self._features: dict[str, Tensor] = {}
        self._seeds: dict[tuple[str, str, Blend], int] = {}
        self.segments: list[int] = []
        for start, stop in zip((None, *self.slots), (*self.slots, None), strict=True):
            flops, x = _count(self._host.run, x, start, stop)
            self.segments.append(flops)
            if stop is not None:
                self._features[stop] = x

    def seed(self, slot: str, name: str, blend: Blend) -> int:
        key = (slot, name, blend)
        if key not in self._seeds:
            topology, channels = self._host.topology, self._host.slot(slot).channels
            with torch.device("meta"):
                body = blueprint(topology, name).build(channels)
                seed = Seed(body, blueprint=name, blend=blend, channels=channels, topology=topology)
            self._seeds[key], _ = _count(seed, self._features[slot], 1.0)
        return self._seeds[key]

    def forward(self, seeds: dict[str, int], settings: Settings, start: str | None = None) -> int:
        """One sample through the network from a slot on, its own seed included; `seeds` are their costs by slot."""
        first = 0 if start is None else self.slots.index(start)
        segments = self.segments[0 if start is None else first + 1 :]
        return sum(segments) + sum(seeds[name] for name in self.slots[first:] if _takes_part(settings, name))

    def train(self, seeds: dict[str, int], settings: Settings) -> int:
        """One sample forward and backward, with the second pass of each seed behind the host."""
        total = FORWARD_AND_BACKWARD * self.forward(seeds, settings)
        for name, setting in settings.items():
            if setting.mode is Mode.FADING:
                total -= seeds[name]
            elif setting.mode is Mode.BEHIND:
                total += FORWARD_AND_BACKWARD * seeds[name] + FORWARD_AND_INPUTS * self.forward(seeds, settings, name)
        return total

    def probe(self, seeds: dict[str, int], settings: Settings, off: Collection[str]) -> int:
        """One sample for each slot in `off`, from that slot on with its seed switched off."""
        return sum(self.forward(seeds, settings, name) - seeds[name] for name in off)


def _takes_part(settings: Settings, slot: str) -> bool:
    return slot in settings and settings[slot].mode is not Mode.BEHIND


def _count(run: Callable[..., Tensor], *arguments: object) -> tuple[int, Tensor]:
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        out = run(*arguments)
    return int(counter.get_total_flops()), out
