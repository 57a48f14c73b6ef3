"""What a step is worth."""

from esper.rewards.detectors import DETECTORS
from esper.rewards.reward import Reward, RewardBreakdown, Term

__all__ = [
    "DETECTORS",
    "Reward",
    "RewardBreakdown",
    "Term",
]
