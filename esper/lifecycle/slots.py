"""The state of every slot of every environment, as tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from esper.lifecycle.alpha import Curve
from esper.lifecycle.stages import LIVE, OCCUPIED, Stage


@dataclass(frozen=True)
class Slots:
    """The state of all slots; every field is [envs, slots]. A value that was never measured is NaN.

    A column is a slot by name. A host that lacks a slot of another host has an empty column that never changes.
    """

    stage: Tensor  # int64, Stage values
    steps_in_stage: Tensor  # int64
    age: Tensor  # int64, steps since germination
    blueprint: Tensor  # int64, index into the action space's blueprints; -1 without a seed
    blend: Tensor  # int64, Blend values; -1 without a seed
    alpha: Tensor  # float32
    alpha_start: Tensor  # float32, alpha at the start of the current ramp
    alpha_target: Tensor  # float32, alpha at its end; before blending, the target that the seed will blend to
    ramp_done: Tensor  # int64, ticks done
    ramp_ticks: Tensor  # int64, ticks in total
    curve: Tensor  # int64, Curve values
    contribution: Tensor  # float32, the latest measurement
    contribution_age: Tensor  # int64, steps since it was measured; -1 = never
    health: Tensor  # float32 in [0, 1], the latest measurement
    exists: Tensor  # bool, whether the host of the environment has the slot

    @classmethod
    def empty(cls, envs: int, slots: int, device: torch.device | None = None, exists: Tensor | None = None) -> "Slots":
        """All slots dormant; `exists`, bool [envs, slots], is whether a host has them, None is all of them."""

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((envs, slots), value, dtype=dtype, device=device)

        present = full(True, torch.bool) if exists is None else torch.as_tensor(exists, device=device)
        return cls(**{name: full(*value) for name, value in _EMPTY.items()}, exists=present)

    def __getitem__(self, rows: slice | Tensor) -> "Slots":
        """The slots of some environments."""
        return Slots(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def where(self, mask: Tensor, **values: Tensor | float) -> "Slots":
        """A copy with new values for some fields where `mask` [envs, slots] is true."""
        changed = {}
        for name, value in values.items():
            old = getattr(self, name)
            changed[name] = torch.where(mask, torch.as_tensor(value, dtype=old.dtype, device=old.device), old)
        return replace(self, **changed)

    def clear(self, mask: Tensor) -> "Slots":
        """A copy in which the slots in `mask` are empty; `stage`, `steps_in_stage` and `exists` do not change."""
        return self.where(
            mask, **{name: value for name, (value, _) in _EMPTY.items() if name not in ("stage", "steps_in_stage")}
        )

    def in_stage(self, stages: Iterable[Stage]) -> Tensor:
        """Whether each slot is in one of the stages: bool [envs, slots]."""
        return torch.isin(self.stage, torch.tensor([int(stage) for stage in stages], device=self.stage.device))

    @property
    def live(self) -> Tensor:
        """Whether each slot has a seed that may still be pruned: bool [envs, slots]."""
        return self.in_stage(LIVE)

    @property
    def occupied(self) -> Tensor:
        """Whether each slot has a seed: bool [envs, slots]."""
        return self.in_stage(OCCUPIED)

    @property
    def moving(self) -> Tensor:
        """Whether alpha is on a ramp with ticks left: bool [envs, slots]."""
        return (self.stage == Stage.BLENDING) & (self.ramp_done < self.ramp_ticks)

    @property
    def blending_out(self) -> Tensor:
        """Whether alpha is on a ramp to 0: bool [envs, slots]."""
        return (self.stage == Stage.BLENDING) & (self.alpha_target == 0)


_NAN = float("nan")
_EMPTY: dict[str, tuple[float, torch.dtype]] = {
    "stage": (Stage.DORMANT, torch.int64),
    "steps_in_stage": (0, torch.int64),
    "age": (0, torch.int64),
    "blueprint": (-1, torch.int64),
    "blend": (-1, torch.int64),
    "alpha": (0.0, torch.float32),
    "alpha_start": (0.0, torch.float32),
    "alpha_target": (0.0, torch.float32),
    "ramp_done": (0, torch.int64),
    "ramp_ticks": (0, torch.int64),
    "curve": (Curve.LINEAR, torch.int64),
    "contribution": (_NAN, torch.float32),
    "contribution_age": (-1, torch.int64),
    "health": (_NAN, torch.float32),
}


@dataclass(frozen=True)
class SeedMeasurements:
    """Measurements of each seed in one step; every field is float32 [envs, slots], NaN where not measured."""

    contribution: Tensor  # validation score with the seed minus the score with it switched off
    health: Tensor  # of its gradients: 1 is best, 0 is non-finite

    @classmethod
    def none(cls, slots: Slots) -> "SeedMeasurements":
        """No measurements."""
        nan = torch.full_like(slots.alpha, _NAN)
        return cls(contribution=nan, health=nan)


@dataclass(frozen=True)
class Events:
    """The changes of stage in one call."""

    entered: Tensor  # bool [envs, slots, stages]: the stages that each slot entered, possibly several

    def into(self, stage: Stage) -> Tensor:
        """Whether each slot entered `stage`: bool [envs, slots]."""
        return self.entered[..., int(stage)]


def merge_slot_names(hosts: Iterable[Sequence[str]]) -> list[str]:
    """The names of all slots of some hosts, each once, in the order of each host where their orders agree.

    A new name follows the one before it in its own host.
    """
    merged: list[str] = []
    for names in hosts:
        place = 0
        for name in names:
            if name not in merged:
                merged.insert(place, name)
            place = merged.index(name) + 1
    return merged
