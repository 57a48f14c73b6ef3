"""The lifecycle of seeds: stages, actions, masks, and the slots of all environments as tensors."""

from esper.lifecycle.actions import HEAD_NAMES, HEADS, ActionSpace, Blend, Decision, Head, Op
from esper.lifecycle.alpha import Curve
from esper.lifecycle.layout import Layout
from esper.lifecycle.masks import Masks, active, available, causal, legal
from esper.lifecycle.rules import Gate, Rules, gates
from esper.lifecycle.slots import Events, SeedMeasurements, Slots, merge_slot_names
from esper.lifecycle.stages import LIVE, NEXT, OCCUPIED, TRANSITIONS, Stage
from esper.lifecycle.transitions import apply, commit, evict, tick

__all__ = [
    "HEADS",
    "HEAD_NAMES",
    "LIVE",
    "NEXT",
    "OCCUPIED",
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
    "active",
    "apply",
    "available",
    "causal",
    "commit",
    "evict",
    "gates",
    "legal",
    "merge_slot_names",
    "tick",
]
