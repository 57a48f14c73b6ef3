"""Observations: the feature table, and the view that features are computed from."""

from esper.observation.features import BASE, BASE_WIDTH, PER_SLOT, SLOT_WIDTH, Feature
from esper.observation.observation import Observation, PolicyInputs, observe
from esper.observation.view import HISTORY, HostMeasurements, View, first_view, next_view

__all__ = [
    "BASE",
    "BASE_WIDTH",
    "HISTORY",
    "PER_SLOT",
    "SLOT_WIDTH",
    "Feature",
    "HostMeasurements",
    "Observation",
    "PolicyInputs",
    "View",
    "first_view",
    "next_view",
    "observe",
]
