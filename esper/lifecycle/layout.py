"""Names of the inputs and outputs of a policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from esper.lifecycle.actions import ALL_SLOTS, ActionSpace


@dataclass(frozen=True)
class Layout:
    """What a policy observes and chooses, by name. It sets the sizes of networks, and is saved in checkpoints.

    A policy does not depend on the number and names of slots.
    """

    base: tuple[str, ...]  # columns of the host's features
    slot: tuple[str, ...]  # columns of each slot's features
    candidate: tuple[str, ...]  # columns that describe a blueprint in a slot
    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    options: dict[str, tuple[str, ...]]  # by head, op first
    users: dict[str, tuple[str, ...]]  # the ops that use each head
    defaults: dict[str, str] = field(default_factory=dict)  # option of a head for a policy that does not know the head
    base_groups: dict[str, str] = field(default_factory=dict)  # by column: the optional group that it belongs to
    slot_groups: dict[str, str] = field(default_factory=dict)
    features: str = "absolute"  # name of the feature set
    traits: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of blueprints: what each does, and its reach

    @classmethod
    def from_space(
        cls,
        space: ActionSpace,
        *,
        base: Mapping[str, str | None],
        slot: Mapping[str, str | None],
        candidate: Sequence[str],
        features: str = "absolute",
        traits: Mapping[str, tuple[str, ...]] | None = None,
    ) -> "Layout":
        """The layout of an action space; `base` and `slot` have the optional group of each column, or None."""
        return cls(
            base=tuple(base),
            slot=tuple(slot),
            candidate=tuple(candidate),
            slots=space.slots,
            blueprints=space.blueprints,
            options={head.name: head.options for head in space.heads},
            users={head.name: tuple(op.name for op in space.ops if op in head.ops) for head in space.heads},
            defaults={
                head.name: head.options[space.default_option(head.name)]
                for head in space.heads
                if head.name not in ("op", "slot", "blueprint")
            },
            base_groups={column: group for column, group in base.items() if group is not None},
            slot_groups={column: group for column, group in slot.items() if group is not None},
            features=features,
            traits=dict(traits or {}),
        )

    @property
    def head_names(self) -> tuple[str, ...]:
        return tuple(self.options)

    @property
    def ops(self) -> tuple[str, ...]:
        return self.options["op"]

    @property
    def all_slots(self) -> bool:
        """Whether the slot head has one more option behind the slots: all of them."""
        return ALL_SLOTS in self.options.get("slot", ())

    @property
    def groups(self) -> tuple[str, ...]:
        """The optional groups of features."""
        return tuple(dict.fromkeys((*self.base_groups.values(), *self.slot_groups.values())))

    @property
    def base_inputs(self) -> tuple[str, ...]:
        """The inputs of a policy that do not belong to a slot: features, and a flag for each optional group."""
        return (*self.base, *(f"available={group}" for group in self.groups))

    def uses(self, device: torch.device | None = None) -> Tensor:
        """Which heads each op uses: bool [ops, heads]."""
        return torch.tensor([[op in users for users in self.users.values()] for op in self.ops], device=device)

    def group_columns(self, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        """Which group each column belongs to: bool [groups, base] and [groups, slot]."""
        base = [[self.base_groups.get(column) == group for column in self.base] for group in self.groups]
        slot = [[self.slot_groups.get(column) == group for column in self.slot] for group in self.groups]
        size = len(self.groups)
        return (
            torch.tensor(base, dtype=torch.bool, device=device).view(size, len(self.base)),
            torch.tensor(slot, dtype=torch.bool, device=device).view(size, len(self.slot)),
        )

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Layout":
        return cls(**{key: _frozen(value) for key, value in saved.items()})

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a checkpoint."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(part) for key, part in value.items()}
    return tuple(value) if isinstance(value, list) else value
