"""Observations: the feature table, and the view that features are computed from."""

from esper.observation.feature_sets import FEATURE_SETS, observation_page
from esper.observation.features import Feature, FeatureSet
from esper.observation.observation import Observation, PolicyInputs, observe
from esper.observation.view import HISTORY, ClockView, HostMeasurements, View, first_view, next_view

__all__ = [
    "FEATURE_SETS",
    "HISTORY",
    "ClockView",
    "Feature",
    "FeatureSet",
    "HostMeasurements",
    "Observation",
    "PolicyInputs",
    "View",
    "first_view",
    "next_view",
    "observation_page",
    "observe",
]
