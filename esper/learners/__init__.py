"""Trained controllers: where they came from, what they learned on, and the policies inside."""

from esper.learners.learner import Learner, keep, load_learner, load_learners
from esper.learners.origin import locate
from esper.learners.task import ELSEWHERE, absolute, as_trained, beside, differences, named, task_of

__all__ = [
    "ELSEWHERE",
    "Learner",
    "absolute",
    "as_trained",
    "beside",
    "differences",
    "keep",
    "load_learner",
    "load_learners",
    "locate",
    "named",
    "task_of",
]
