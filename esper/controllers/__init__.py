"""Who decides about growth."""

from esper.controllers.chance import Chance, calibrated_rates
from esper.controllers.controller import Controller, choose, is_legal
from esper.controllers.distribution import Factored, Logits
from esper.controllers.fragrow import Fragrow
from esper.controllers.heuristic import Heuristic
from esper.controllers.learned import Choice, Learned, Permuted, Recollection
from esper.controllers.network import Policy, State
from esper.controllers.schedule import Entry, Schedule, random_entries
from esper.controllers.simple import Nothing, Replay
from esper.controllers.statistics import Moments, RunningStatistics

__all__ = [
    "Chance",
    "Choice",
    "Controller",
    "Entry",
    "Factored",
    "Fragrow",
    "Heuristic",
    "Learned",
    "Logits",
    "Moments",
    "Nothing",
    "Permuted",
    "Policy",
    "Recollection",
    "Replay",
    "RunningStatistics",
    "Schedule",
    "State",
    "calibrated_rates",
    "choose",
    "is_legal",
    "random_entries",
]
