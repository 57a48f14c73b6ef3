"""What an evaluation plays."""

from esper.comparison.choice import check_arms
from esper.comparison.comparison import Comparison

__all__ = ["Comparison", "check_arms"]
