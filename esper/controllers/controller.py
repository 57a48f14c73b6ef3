"""The Controller protocol, and helpers that build actions from the names of their options."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from esper.lifecycle import ActionSpace, Masks, Op
from esper.observation import Observation

Memory = TypeVar("Memory")


class Controller(Protocol[Memory]):
    """Decides for all environments. It is stateless: its memory is passed in and returned."""

    flops: int  # of a decision in one environment; rules count as 0

    def begin(self, episode_seeds: Sequence[int]) -> Memory:
        """The memory at the start of the episodes; an episode's random draws depend on its own episode seed only."""

    def act(self, observation: Observation, memory: Memory) -> tuple[Tensor, Memory]:
        """The actions, int64 [envs, heads], and the memory for the next step."""


def make_action(space: ActionSpace, op: Op, **options: str) -> Tensor:
    """The action [heads] of one environment from option names; heads that are not named take their default option."""
    names = {"op": op.name, **options}
    chosen = [
        head.options.index(names[head.name]) if head.name in names else space.default_option(head.name)
        for head in space.heads
    ]
    return torch.tensor(chosen)


def wait_action(space: ActionSpace) -> Tensor:
    return make_action(space, Op.WAIT)


def is_legal(space: ActionSpace, masks: Masks, env: int, op: Op, slot: str) -> bool:
    """Whether an op is legal in a slot, or in `all`, of one environment."""
    if op not in space.ops:
        return False
    return bool(masks.slot[env, space.ops.index(op), space.slot_options.index(slot)])


def first_available(space: ActionSpace, names: Sequence[str]) -> str:
    """The first of some blueprints that the action space has."""
    for name in names:
        if name in space.blueprints:
            return name
    raise ValueError(f"blueprint={list(names)}: must have one of {', '.join(space.blueprints)}.")
