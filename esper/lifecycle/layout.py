"""Sizes and names of the inputs and outputs of a policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.lifecycle.actions import ActionSpace


@dataclass(frozen=True)
class Layout:
    """What a policy observes and chooses. It sets the sizes of networks and storage, and is saved in checkpoints.

    Policies with equal layouts are interchangeable.
    """

    base: int  # number of features of the host
    slot: int  # number of features of each slot
    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    options: dict[str, tuple[str, ...]]  # by head, op first
    users: dict[str, tuple[str, ...]]  # the ops that use each head
    features: str = "absolute"  # name of the feature set

    @classmethod
    def from_space(cls, space: ActionSpace, base: int, slot: int, features: str = "absolute") -> "Layout":
        return cls(
            base,
            slot,
            space.slots,
            space.blueprints,
            {head.name: head.options for head in space.heads},
            {head.name: tuple(op.name for op in space.ops if op in head.ops) for head in space.heads},
            features,
        )

    @property
    def head_names(self) -> tuple[str, ...]:
        return tuple(self.options)

    @property
    def ops(self) -> tuple[str, ...]:
        return self.options["op"]

    def uses(self, device: torch.device | None = None) -> Tensor:
        """Which heads each op uses: bool [ops, heads]."""
        return torch.tensor([[op in users for users in self.users.values()] for op in self.ops], device=device)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Layout":
        return cls(
            base=saved["base"],
            slot=saved["slot"],
            slots=tuple(saved["slots"]),
            blueprints=tuple(saved["blueprints"]),
            options={name: tuple(options) for name, options in saved["options"].items()},
            users={name: tuple(users) for name, users in saved["users"].items()},
            features=saved.get("features", "absolute"),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a checkpoint."""
        return {
            "base": self.base,
            "slot": self.slot,
            "slots": list(self.slots),
            "blueprints": list(self.blueprints),
            "options": {name: list(options) for name, options in self.options.items()},
            "users": {name: list(users) for name, users in self.users.items()},
            "features": self.features,
        }
