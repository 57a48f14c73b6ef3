"""The lifecycle of seeds: stages, actions, masks, and the slots of all environments as tensors."""

from esper.lifecycle.actions import (
    ALL_SLOTS,
    FEW_HEADS,
    HEAD_NAMES,
    HEADS,
    PLAIN_OPTIONS,
    ActionSpace,
    Blend,
    Decision,
    Head,
    Op,
    choice_name,
)
from esper.lifecycle.alpha import Curve
from esper.lifecycle.layout import Layout
from esper.lifecycle.masks import Masks, acted_slots, active, available, causal, legal
from esper.lifecycle.rules import Gate, Rules, gates
from esper.lifecycle.slots import Events, SeedMeasurements, Slots, merge_slot_names
from esper.lifecycle.stages import LIVE, NEXT, OCCUPIED, TRANSITIONS, Stage
from esper.lifecycle.transitions import apply, commit, evict, tick

__all__ = [
    "ALL_SLOTS",
    "FEW_HEADS",
    "HEADS",
    "HEAD_NAMES",
    "LIVE",
    "NEXT",
    "OCCUPIED",
    "PLAIN_OPTIONS",
    "TRANSITIONS",
    "ActionSpace",
    "Blend",
    "Curve",
    "Decision",
    "Events",
    "Gate",
    "Head",
    "Layout",
    "Masks",
    "Op",
    "Rules",
    "SeedMeasurements",
    "Slots",
    "Stage",
    "acted_slots",
    "active",
    "apply",
    "available",
    "causal",
    "choice_name",
    "commit",
    "evict",
    "gates",
    "legal",
    "merge_slot_names",
    "tick",
]
