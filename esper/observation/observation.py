"""What a controller is given: features, masks and the view they are made from."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from esper.lifecycle import Masks
from esper.observation.features import BASE, PER_SLOT
from esper.observation.view import View

T = TypeVar("T")


@dataclass(frozen=True)
class PolicyInputs:
    """What a network reads."""

    base: Tensor  # float32 [envs, base features]
    slots: Tensor  # float32 [envs, slots, features of a slot]
    blueprints: Tensor  # int64 [envs, slots], 0 for none, else 1 + index into the space's blueprints
    masks: Masks

    def to(self, device: torch.device) -> "PolicyInputs":
        base, slots, blueprints = (
            part.to(device, non_blocking=True) for part in (self.base, self.slots, self.blueprints)
        )
        return PolicyInputs(base, slots, blueprints, self.masks.to(device))


@dataclass(frozen=True)
class Observation(PolicyInputs):
    """What a controller is given. Networks read the inputs; hand-written rules may read the view."""

    view: View

    def rows(self, index: slice) -> "Observation":
        """What is seen of some environments."""
        return _rows(self, index)


def _rows(values: T, index: slice) -> T:
    """A dataclass of tensors [envs, ...], with only some of the environments."""
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


def observe(view: View, masks: Masks) -> Observation:
    """The observation of a view."""
    return Observation(
        base=torch.cat([feature.make(view) for feature in BASE], -1),
        slots=torch.cat([feature.make(view) for feature in PER_SLOT], -1),
        blueprints=view.slots.blueprint + 1,
        masks=masks,
        view=view,
    )
