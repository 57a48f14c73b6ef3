"""Who decides about growth."""

from esper.controllers.controller import Controller
from esper.controllers.distribution import Factored, Logits
from esper.controllers.heuristic import Heuristic
from esper.controllers.learned import Choice, Learned, Recollection
from esper.controllers.network import Policy, State
from esper.controllers.simple import Chance, Nothing, Replay, Schedule
from esper.controllers.statistics import Moments, RunningStatistics

__all__ = [
    "Chance",
    "Choice",
    "Controller",
    "Factored",
    "Heuristic",
    "Learned",
    "Logits",
    "Moments",
    "Nothing",
    "Policy",
    "Recollection",
    "Replay",
    "RunningStatistics",
    "Schedule",
    "State",
]
