"""The stages of a seed and the transitions between them."""

from collections.abc import Mapping
from enum import IntEnum


class Stage(IntEnum):
    """Where a slot's seed is in its lifecycle."""

    DORMANT = 0  # the slot is empty
    GERMINATED = 1  # grafted, not yet in the forward pass
    TRAINING = 2  # trains in isolation: the host's output and gradients do not change
    BLENDING = 3  # alpha changes or stays between 0 and 1; blending out if its target is 0
    HOLDING = 4  # fully blended in, until it is fossilised or pruned
    FOSSILIZED = 5  # permanent
    PRUNED = 6  # removed; the slot is free again after the cooldown


TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    Stage.DORMANT: frozenset({Stage.GERMINATED}),
    Stage.GERMINATED: frozenset({Stage.TRAINING, Stage.PRUNED}),
    Stage.TRAINING: frozenset({Stage.BLENDING, Stage.PRUNED}),
    Stage.BLENDING: frozenset({Stage.HOLDING, Stage.PRUNED}),
    Stage.HOLDING: frozenset({Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED}),  # BLENDING: a new alpha target
    Stage.FOSSILIZED: frozenset(),
    Stage.PRUNED: frozenset({Stage.DORMANT}),
}

NEXT: Mapping[Stage, Stage] = {  # the stage that ADVANCE leads to
    Stage.GERMINATED: Stage.TRAINING,
    Stage.TRAINING: Stage.BLENDING,
    Stage.BLENDING: Stage.HOLDING,
}

LIVE = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING)  # may still be pruned
OCCUPIED = (*LIVE, Stage.FOSSILIZED)  # the slot has a seed
