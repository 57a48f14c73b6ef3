"""The seeds in the user's network: grafted, removed and switched as a plan has it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from esper.grow.discovery import SlotInfo, SlotTable
from esper.grow.optimizers import SeedGroups
from esper.grow.plan import GrowthPlan, PlannedSeed
from esper.growth import HookedSlot, Mode, SeedSettings, attach_slots, detach_slots
from esper.rng import derive_seed


@dataclass(frozen=True)
class StructureChange:
    """Seeds that were added and removed. If there are any, a wrapper such as DDP must be built anew."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)

    def __add__(self, later: "StructureChange") -> "StructureChange":
        return StructureChange(self.added + later.added, self.removed + later.removed)


class NetworkStructure:
    """The slots of a network, their seeds, and the seeds' parameters in the optimizers.

    Arguments:
        model: the network
        table: its slots
        groups: the optimizers
        rng_seed: the weights of seeds are derived from it
    """

    def __init__(self, model: nn.Module, table: SlotTable, groups: SeedGroups, *, rng_seed: int) -> None:
        self._model, self._groups, self._rng_seed = model, groups, rng_seed
        self._modules = {slot.name: model.get_submodule(slot.name) for slot in table}
        self._slots = {slot.name: _make_slot(slot, model) for slot in table}
        self._grafts = 0
        attach_slots(model, list(self._slots.values()))

    def follow(self, plan: GrowthPlan) -> StructureChange:
        """Add and remove seeds so that the network has those of the plan."""
        seeds = plan.seeds
        removed = [name for name, slot in self._slots.items() if slot.seed is not None and name not in seeds]
        for name in removed:
            self._remove(name)
        added = [name for name in seeds if self._slots[name].seed is None]
        for name in added:
            self._grafts += 1
            self._graft(seeds[name], derive_seed("grown seed", self._rng_seed, self._grafts))
        self._set_modes(plan.settings)
        return StructureChange(tuple(added), tuple(removed))

    def rebuild(self, plan: GrowthPlan, state: Mapping[str, Any]) -> None:
        """Build the seeds of a saved structure, in the order of their parameter groups; weights are loaded later."""
        for name in [name for name, slot in self._slots.items() if slot.seed is not None]:
            self._remove(name)
        seeds = plan.seeds
        for name in state["order"]:
            self._graft(seeds[name], 0)
        self._set_modes(plan.settings)
        self._grafts = state["grafts"]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._groups.order(), "grafts": self._grafts}

    @property
    def probed(self) -> tuple[str, ...]:
        """Slots whose seed is in the output."""
        slots = self._slots.items()
        return tuple(n for n, s in slots if s.seed is not None and s.mode is not Mode.ISOLATED and s.alpha.item() > 0)

    def close(self) -> None:
        """Remove the slots if none has a seed."""
        if all(slot.seed is None for slot in self._slots.values()):
            detach_slots(self._model)

    def _graft(self, seed: PlannedSeed, rng_seed: int) -> None:
        module = self._modules[seed.slot]
        device = next((p.device for m in (module, self._model) for p in m.parameters()), torch.device("cpu"))
        new = self._slots[seed.slot].graft(seed.blueprint, seed.blend, rng_seed=rng_seed, device=device)
        self._groups.add(seed.slot, module, list(new.parameters()))

    def _remove(self, name: str) -> None:
        self._groups.remove(name)
        self._slots[name].remove()

    def _set_modes(self, settings: SeedSettings) -> None:
        for name, slot in self._slots.items():
            setting = settings.get(name)
            if slot.seed is not None:
                slot.set(Mode.BLENDED if setting is None else setting.mode, 0.0 if setting is None else setting.alpha)


def shared_blueprints(slots: Sequence[SlotInfo]) -> tuple[str, ...]:
    """The blueprints that fit all of some slots."""
    shared = [name for name in slots[0].blueprints if all(name in slot.blueprints for slot in slots)]
    if not shared:
        raise ValueError(f"slots={[slot.name for slot in slots]}: must have a blueprint that fits all of them.")
    return tuple(shared)


def _make_slot(info: SlotInfo, model: nn.Module) -> HookedSlot:
    module = model.get_submodule(info.name)
    weights = [p for m in (module, model) for p in m.parameters() if p.is_floating_point()]
    return HookedSlot(
        info.name,
        topology=info.topology,
        channels=info.channels,
        channels_last=info.channels_last,
        output=info.output,
        keywords=info.keywords,
        dtype=weights[0].dtype if weights else None,
    )
