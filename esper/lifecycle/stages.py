"""The stages of a seed and the transitions between them."""

from collections.abc import Mapping
from enum import IntEnum


class Stage(IntEnum):
    """Where a slot's seed is in its lifecycle."""

    DORMANT = 0  # the slot is empty
    GERMINATED = 1  # grafted, not yet in the forward pass
    TRAINING = 2  # trains behind the host, invisible to it
    BLENDING = 3  # alpha is between 0 and 1, moving or resting; on its way out when its target is 0
    HOLDING = 4  # fully blended in, awaiting the verdict
    FOSSILIZED = 5  # kept for good
    PRUNED = 6  # removed; the slot cools down before it is free again


TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    Stage.DORMANT: frozenset({Stage.GERMINATED}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.PRUNED}),
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
    Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
    Stage.HOLDING: frozenset({Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED}),  # BLENDING: a new alpha target
    Stage.FOSSILIZED: frozenset(),
    Stage.PRUNED: frozenset({Stage.DORMANT}),
}

NEXT: Mapping[Stage, Stage] = {  # where advancing leads
    Stage.GERMINATED: Stage.TRAINING,
    Stage.TRAINING: Stage.BLENDING,
    Stage.BLENDING: Stage.HOLDING,
}

LIVE = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)  # undecided: may still be pruned
OCCUPIED = (*LIVE, Stage.FOSSILIZED)  # there is a module in the slot
