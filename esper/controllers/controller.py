"""What a controller is, and how one is asked for an action by the names of its options."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from esper.lifecycle import ActionSpace, Masks, Op
from esper.observation import Observation

Memory = TypeVar("Memory")


class Controller(Protocol[Memory]):
    """Decides for all environments. It keeps nothing itself: what it remembers goes through its caller."""

    flops: int  # of a decision in one environment; rules are taken for free

    def begin(self, episode_seeds: Sequence[int]) -> Memory:
        """The memory with which episodes of these seeds start; all chance of an episode follows from its own seed."""

    def act(self, observation: Observation, memory: Memory) -> tuple[Tensor, Memory]:
        """An action [envs, heads], and the memory for the next."""


def make_action(space: ActionSpace, op: Op, **options: str) -> Tensor:
    """One environment's action [heads] from names; heads that are not named take their usual option."""
    names = {"op": op.name, **options}
    chosen = [
        head.options.index(names[head.name]) if head.name in names else space.default_option(head.name)
        for head in space.heads
    ]
    return torch.tensor(chosen)


def wait_action(space: ActionSpace) -> Tensor:
    return make_action(space, Op.WAIT)


def is_legal(space: ActionSpace, masks: Masks, env: int, op: Op, slot: str) -> bool:
    """Whether an op may be done in a slot of one environment now."""
    if op not in space.ops:
        return False
    return bool(masks.slot[env, space.ops.index(op), space.slots.index(slot)])


def first_available(space: ActionSpace, names: Sequence[str]) -> str:
    """The first of some blueprints that this space has."""
    found = next((name for name in names if name in space.blueprints), None)
    if found is None:
        raise ValueError(f"blueprint={list(names)}: none is in this space; it has {', '.join(space.blueprints)}.")
    return found
