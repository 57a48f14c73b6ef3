"""What a step is worth."""

from esper.rewards.detectors import DETECTORS
from esper.rewards.reward import Payment, Reward, Term

__all__ = ["DETECTORS", "Payment", "Reward", "Term"]
