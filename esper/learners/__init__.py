"""Trained controllers: where they came from, what they learned on, and the policies inside."""

from esper.learners.learner import Learner, begin_with, keep, load_learner, load_learners
from esper.learners.origin import PRETRAINED, locate, origin_of
from esper.learners.task import ELSEWHERE, absolute, as_trained, beside, differences, named, task_of

__all__ = [
    "ELSEWHERE",
    "PRETRAINED",
    "Learner",
    "absolute",
    "as_trained",
    "begin_with",
    "beside",
    "differences",
    "keep",
    "load_learner",
    "load_learners",
    "locate",
    "named",
    "origin_of",
    "task_of",
]
