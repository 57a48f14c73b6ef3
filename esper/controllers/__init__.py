"""Who decides about growth."""

from esper.controllers.controller import Controller
from esper.controllers.heuristic import Heuristic
from esper.controllers.simple import Chance, Nothing, Replay, Schedule

__all__ = ["Chance", "Controller", "Heuristic", "Nothing", "Replay", "Schedule"]
