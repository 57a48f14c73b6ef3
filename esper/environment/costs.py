"""Parameters of a host with seeds, and its FLOPs per sample: forward, training and probes."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from esper.blueprints import blueprint
from esper.flops import Flops
from esper.growth import Mode, SeedSettings, count_flops, seed_flops, seed_parameters
from esper.hosts import Host, count_parameters
from esper.lifecycle import Blend
from esper.observation import Descriptors, SlotShape, describe_host


class HostCosts:
    """Parameters of a host and its seeds, and FLOPs per sample of its segments and seeds.

    Hosts and blueprints may state their FLOPs; where they do not, torch counts them on the meta device.
    In all methods `seeds` has the costs of the current seeds, by slot.

    Arguments:
        build: builds the host
        example: one sample, [1, ...], on any device
    """

    def __init__(self, build: Callable[[], Host], example: Tensor) -> None:
        with torch.device("meta"):
            self._host = build().eval()
        x = example.to("meta")
        self._input_positions = math.prod(x.shape[2:]) if x.ndim > 2 else x.shape[1]  # pixels, or tokens
        stated = self._host.flops(x.shape[1:])
        self.slots = tuple(slot.name for slot in self._host.slots)
        self._features: dict[str, Tensor] = {}
        self._seeds: dict[tuple[str, str, Blend], Flops] = {}
        self._seed_parameters: dict[tuple[str, str, Blend], int] = {}
        self.parameters = count_parameters(self._host)
        embeddings = [module for module in self._host.modules() if isinstance(module, nn.Embedding)]
        self.embedding_parameters = sum(module.weight.numel() for module in embeddings)
        counted: list[Flops] = []
        for start, stop in zip((None, *self.slots), (*self.slots, None), strict=True):
            cost, x = count_flops(self._host.run, x, start, stop)
            counted.append(cost)
            if stop is not None:
                self._features[stop] = x
        self.segments = counted if stated is None else stated
        self.outputs = x.shape[-1]

    def seed(self, slot: str, name: str, blend: Blend) -> Flops:
        """The cost of a seed in a slot, its blend gate included."""
        key = (slot, name, blend)
        if key not in self._seeds:
            self._seeds[key] = seed_flops(self._host.topology, name, blend, self._features[slot])
        return self._seeds[key]

    def seed_parameters(self, slot: str, name: str, blend: Blend) -> int:
        """The parameters of a seed in a slot, its blend gate included."""
        key = (slot, name, blend)
        if key not in self._seed_parameters:
            channels = self._host.slot(slot).channels
            self._seed_parameters[key] = seed_parameters(self._host.topology, name, blend, channels)
        return self._seed_parameters[key]

    def traits(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """What each blueprint does, and its reach."""
        return {name: blueprint(self._host.topology, name).traits for name in names}

    def describe(self, slots: Sequence[str], names: Sequence[str]) -> Descriptors:
        """The descriptors of an episode with this host.

        Arguments:
            slots: names of all columns; those that the host does not have are 0
            names: blueprints
        """
        own = [slot for slot in slots if slot in self.slots]
        total = sum(segment.total for segment in self.segments)
        shapes = {
            slot: SlotShape(
                depth=(self.slots.index(slot) + 1) / (len(self.slots) + 1),
                channels=float(self._host.slot(slot).channels),
                resolution=self._positions(slot) / self._input_positions,
                cost=self.segments[self.slots.index(slot)].total / total,
            )
            for slot in own
        }
        relative = {
            (slot, name): (
                self.seed_parameters(slot, name, Blend.ADD) / self.parameters,
                self.seed(slot, name, Blend.ADD).total / total,
            )
            for slot in own
            for name in names
        }
        entries = {name: blueprint(self._host.topology, name) for name in names}
        return describe_host(slots, shapes, entries, relative)

    def _positions(self, slot: str) -> int:
        """Pixels or tokens at a slot."""
        return self._features[slot].numel() // self._host.slot(slot).channels

    def forward(self, seeds: Mapping[str, Flops], settings: SeedSettings, start: str | None = None) -> int:
        """One forward pass, from `start` on with the seed of that slot; None is the whole network."""
        return sum(cost.forward for cost, _ in self._parts(seeds, settings, start))

    def train(self, seeds: Mapping[str, Flops], settings: SeedSettings) -> int:
        """Forward and backward pass through the host and the seeds blended into it.

        With `coadapt` off this is slightly too high: it includes the gradient towards the inputs of blended and fading
        seeds, which is not computed then.
        """
        return sum(cost.total if learns else cost.frozen for cost, learns in self._parts(seeds, settings))

    def isolated(self, seeds: Mapping[str, Flops], settings: SeedSettings) -> int:
        """The second pass of each isolated seed: forward and backward through the seed and the frozen network after it.

        This includes the gradient of a seed's first layer towards its inputs, which is only computed where a
        normalisation precedes that layer.
        """
        isolated = [name for name, setting in settings.items() if setting.mode is Mode.ISOLATED]
        following = (cost.frozen for name in isolated for cost, _ in self._parts(seeds, settings, name))
        return sum(seeds[name].total for name in isolated) + sum(following)

    def probe(self, seeds: Mapping[str, Flops], settings: SeedSettings, off: Collection[str]) -> int:
        """For each slot in `off`, a forward pass from that slot on with its seed switched off."""
        return sum(self.forward(seeds, settings, name) - seeds[name].forward for name in off)

    def _parts(
        self, seeds: Mapping[str, Flops], settings: SeedSettings, start: str | None = None
    ) -> list[tuple[Flops, bool]]:
        """The segments and seeds that a sample passes from a slot on, each with whether its weights are trained."""
        first = 0 if start is None else self.slots.index(start)
        segments = self.segments[0 if start is None else first + 1 :]
        modes = {name: settings[name].mode for name in self.slots[first:] if name in settings}
        passed = [(seeds[name], mode is Mode.BLENDED) for name, mode in modes.items() if mode is not Mode.ISOLATED]
        return [(cost, True) for cost in segments] + passed
