"""Observations: features, masks and the view that features are computed from."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from esper.lifecycle import Masks
from esper.observation.features import FeatureSet
from esper.observation.view import View

Batched = TypeVar("Batched")


@dataclass(frozen=True)
class PolicyInputs:
    """The inputs of a policy network."""

    base: Tensor  # float32 [envs, base features]
    slots: Tensor  # float32 [envs, slots, slot features]
    blueprints: Tensor  # int64 [envs, slots], 0 for no seed, else 1 + index into ActionSpace.blueprints
    exists: Tensor  # bool [envs, slots], whether the host has this slot
    candidates: Tensor  # float32 [envs, slots, blueprints, columns], what each blueprint is like in each slot
    masks: Masks

    def to(self, device: torch.device) -> "PolicyInputs":
        names = [field.name for field in fields(PolicyInputs) if field.name != "masks"]
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in names}
        return PolicyInputs(**moved, masks=self.masks.to(device))


@dataclass(frozen=True)
class Observation(PolicyInputs):
    """The input of a controller. Policy networks read PolicyInputs; rule-based controllers may read the view."""

    view: View

    def rows(self, index: slice) -> "Observation":
        """The observation of some environments."""
        return _rows(self, index)


def _rows(values: Batched, index: slice) -> Batched:
    """A copy of a dataclass of tensors [envs, ...] with only the environments of `index`."""
    changed: dict[str, object] = {}
    for field in fields(values):  # type: ignore[arg-type]  # T is a dataclass
        value = getattr(values, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = value[index]
        elif isinstance(value, dict):
            changed[field.name] = {name: part[index] for name, part in value.items()}
        elif is_dataclass(value):
            changed[field.name] = _rows(value, index)
    return replace(values, **changed)  # type: ignore[type-var]


def observe(view: View, masks: Masks, features: FeatureSet) -> Observation:
    """Compute the observation of a view; the features of a slot that the host lacks are 0."""
    exists = view.slots.exists
    by_slot = torch.cat([feature.make(view) for feature in features.per_slot], -1)
    return Observation(
        base=torch.cat([feature.make(view) for feature in features.base], -1),
        slots=torch.where(exists.unsqueeze(-1), by_slot, 0.0),
        blueprints=view.slots.blueprint + 1,
        exists=exists,
        candidates=view.descriptors.candidates,
        masks=masks,
        view=view,
    )
