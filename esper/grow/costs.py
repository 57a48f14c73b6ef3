"""Parameters and FLOPs of the user's network and of the seeds that may grow in it."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from esper.blueprints import blueprint
from esper.flops import Flops
from esper.grow.discovery import SlotInfo, SlotTable
from esper.growth import seed_flops, seed_parameters
from esper.lifecycle import ActionSpace, Blend, Slots
from esper.observation import Descriptors, SlotShape, describe_host

SeedKind = tuple[str, str, Blend]  # slot, blueprint, blend


class NetworkCosts:
    """Costs of a network, which torch has counted once, and of seeds, which blueprints state.

    Arguments:
        model: the network without seeds
        table: its slots
    """

    def __init__(self, model: nn.Module, table: SlotTable) -> None:
        self._slots: dict[str, SlotInfo] = {slot.name: slot for slot in table}
        self._trace, self._topology = table.trace, table.topology
        self._flops: dict[SeedKind, Flops] = {}
        self._parameters: dict[SeedKind, int] = {}
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.forward = table.trace.forward  # FLOPs of one sample
        self.training = table.trace.forward + table.trace.backward

    @property
    def are_known(self) -> bool:
        """Whether torch could count the FLOPs of the network."""
        return self.forward > 0

    def seed(self, slot: str, name: str, blend: Blend) -> Flops:
        """FLOPs of one sample of a seed."""
        key = (slot, name, blend)
        if key not in self._flops:
            self._flops[key] = seed_flops(self._topology, name, blend, self._slots[slot].features)
        return self._flops[key]

    def seed_parameters(self, slot: str, name: str, blend: Blend) -> int:
        key = (slot, name, blend)
        if key not in self._parameters:
            self._parameters[key] = seed_parameters(self._topology, name, blend, self._slots[slot].channels)
        return self._parameters[key]

    def seeds(self, slots: Slots, space: ActionSpace) -> dict[int, SeedKind]:
        """The seeds by the column of their slot."""
        return {
            column: (
                space.slots[column],
                space.blueprints[int(slots.blueprint[0, column])],
                Blend(int(slots.blend[0, column])),
            )
            for column in slots.occupied[0].nonzero().flatten().tolist()
        }

    def parameters_by_slot(self, slots: Slots, space: ActionSpace) -> Tensor:
        """Parameters of the seeds: [1, slots]."""
        return self._by_slot(
            slots, {column: self.seed_parameters(*seed) for column, seed in self._seeds_of(slots, space)}
        )

    def relative_by_slot(self, slots: Slots, space: ActionSpace) -> Tensor:
        """Training FLOPs of the seeds relative to the network without seeds: [1, slots]; 0 if they are not known."""
        unit = self.training or float("inf")
        return self._by_slot(
            slots, {column: self.seed(*seed).total / unit for column, seed in self._seeds_of(slots, space)}
        )

    def training_flops(self, slots: Slots, space: ActionSpace) -> float:
        """Forward and backward pass of one sample with the present seeds."""
        return self.training + sum(self.seed(*seed).total for _, seed in self._seeds_of(slots, space))

    def forward_flops(self, slots: Slots, space: ActionSpace) -> float:
        """Forward pass of one sample with the present seeds."""
        return self.forward + sum(self.seed(*seed).forward for _, seed in self._seeds_of(slots, space))

    def describe(self, space: ActionSpace) -> Descriptors:
        """The descriptors of slots and blueprints."""
        positions, unit = self._trace.positions, self.training or float("inf")
        shapes = {
            name: SlotShape(
                depth=(index + 1) / (len(self._slots) + 1),
                channels=float(slot.channels),
                resolution=slot.features.numel() / slot.channels / positions,
                cost=slot.cost,
            )
            for index, (name, slot) in enumerate(self._slots.items())
        }
        relative = {
            (slot, name): (
                self.seed_parameters(slot, name, Blend.ADD) / max(1, self.parameters),
                self.seed(slot, name, Blend.ADD).total / unit,
            )
            for slot in space.slots
            for name in space.blueprints
        }
        entries = {name: blueprint(self._topology, name) for name in space.blueprints}
        return describe_host(space.slots, shapes, entries, relative)

    def traits(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """What each blueprint does, and its reach."""
        return {name: blueprint(self._topology, name).traits for name in names}

    def _seeds_of(self, slots: Slots, space: ActionSpace) -> list[tuple[int, SeedKind]]:
        return list(self.seeds(slots, space).items())

    def _by_slot(self, slots: Slots, values: Mapping[int, float]) -> Tensor:
        result = slots.alpha.new_zeros(slots.alpha.shape)
        for column, value in values.items():
            result[0, column] = value
        return result
