"""N host runs stepped together."""

from esper.environment.environment import Environment
from esper.environment.governor import Governor, Reason
from esper.environment.host_run import gradient_health
from esper.environment.observation import BASE_WIDTH, SLOT_WIDTH, Inputs, Observation, View
from esper.environment.oracle import Oracle
from esper.environment.record import Measured, StepRecord, rated
from esper.environment.start import Start
from esper.environment.step import Rewarded, Step

__all__ = [
    "BASE_WIDTH",
    "SLOT_WIDTH",
    "Environment",
    "Governor",
    "Inputs",
    "Measured",
    "Observation",
    "Oracle",
    "Reason",
    "Rewarded",
    "Start",
    "Step",
    "StepRecord",
    "View",
    "gradient_health",
    "rated",
]
