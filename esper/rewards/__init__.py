"""Rewards: weighted lists of terms, each a pure function of a step's record."""

from esper.rewards.detectors import DETECTORS
from esper.rewards.reward import Reward, RewardBreakdown, Term

__all__ = [
    "DETECTORS",
    "Reward",
    "RewardBreakdown",
    "Term",
]
