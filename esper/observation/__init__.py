"""Observations: the feature table, and the view that features are computed from."""

from esper.observation.descriptors import (
    CANDIDATE_COLUMNS,
    LOG_SCALE,
    Descriptors,
    SlotShape,
    describe_candidate,
    describe_host,
)
from esper.observation.feature_sets import FEATURE_SETS, make_layout, observation_page
from esper.observation.features import GROUPS, Feature, FeatureSet
from esper.observation.observation import Observation, PolicyInputs, observe
from esper.observation.view import HISTORY, ClockView, HostMeasurements, View, first_view, next_view

__all__ = [
    "CANDIDATE_COLUMNS",
    "FEATURE_SETS",
    "GROUPS",
    "HISTORY",
    "LOG_SCALE",
    "ClockView",
    "Descriptors",
    "Feature",
    "FeatureSet",
    "HostMeasurements",
    "Observation",
    "PolicyInputs",
    "SlotShape",
    "View",
    "describe_candidate",
    "describe_host",
    "first_view",
    "make_layout",
    "next_view",
    "observation_page",
    "observe",
]
