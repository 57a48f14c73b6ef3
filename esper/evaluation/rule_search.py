"""The choice of a rule that carries over to other tasks: candidates run on training tasks, within a number of episodes.

Episodes are numbered in blocks that have every task once, in an order in which families take turns. All candidates of a
stage run on the same episodes, so differences between tasks cancel.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

Option = TypeVar("Option")
Scores = Callable[[Sequence[Option], range], Sequence[float]]  # of options: means over the episodes with some numbers

STAGES = 3
TASK_SHARES = (8, 4, 1)  # of a halving: a stage runs on this part of the tasks of the last one
RULE_FINALISTS = 2


@dataclass(frozen=True)
class TaskStage:
    """Options that run on the same episodes."""

    numbers: range  # of the episodes of each
    options: int  # how many of the best of the stage before it


@dataclass(frozen=True)
class RuleChoice(Generic[Option]):
    """What a search has chosen, and on what."""

    option: Option
    score: float  # of its last stage
    tried: tuple[tuple[tuple[Option, ...], range], ...]  # options and episodes of each stage
    tasks: int  # of the last stage


def plan_stages(limit: int, tasks: int) -> list[TaskStage]:
    """The stages of a search for the best of many options: few tasks first, then more tasks for the best options.

    Each of the three stages has about a third of the episodes. No two stages share an episode.

    Arguments:
        limit: number of episodes of all stages
        tasks: number of training tasks
    """
    last = min(tasks, max(1, limit // (STAGES * RULE_FINALISTS)))
    sizes = [max(1, last // part) for part in TASK_SHARES]
    counts = [max(1, limit // STAGES // size) for size in sizes]
    counts[0] = max(
        1, (limit - sum(count * size for count, size in zip(counts[1:], sizes[1:], strict=True))) // sizes[0]
    )
    return [
        TaskStage(range(number * tasks, number * tasks + size), count)
        for number, (size, count) in enumerate(zip(sizes, counts, strict=True))
    ]


def choose_of_many(options: Iterable[Option], scores: Scores[Option], tasks: int, limit: int) -> RuleChoice[Option]:
    """The best of many options, by halving over tasks; options are taken as far as episodes allow."""
    stages, tried = plan_stages(limit, tasks), []
    chosen = tuple(islice(options, stages[0].options))
    for stage in stages:
        chosen = chosen[: stage.options]
        found = scores(chosen, stage.numbers)
        tried.append((chosen, stage.numbers))
        order = sorted(range(len(chosen)), key=lambda number: -found[number])
        chosen, best = tuple(chosen[number] for number in order), found[order[0]]
    return RuleChoice(chosen[0], best, tuple(tried), len(stages[-1].numbers))


def choose_of_few(options: Sequence[Option], scores: Scores[Option], tasks: int, limit: int) -> RuleChoice[Option]:
    """The best of a few options: all run on every task once, or on as many as the limit allows.

    Where episodes are left, the best two run on every task again; the mean of both decides, and the score is that of
    the second time, which did not choose them.
    """
    first = range(min(tasks, max(1, limit // len(options))))
    found = dict(zip(options, scores(options, first), strict=True))
    ranked, tried = sorted(options, key=lambda option: -found[option]), [(tuple(options), first)]
    if limit - len(options) * len(first) < RULE_FINALISTS * tasks or len(options) <= RULE_FINALISTS:
        return RuleChoice(ranked[0], found[ranked[0]], tuple(tried), len(first))
    finalists, again = tuple(ranked[:RULE_FINALISTS]), range(tasks, 2 * tasks)
    scored = dict(zip(finalists, scores(finalists, again), strict=True))
    best = max(finalists, key=lambda option: found[option] + scored[option])
    return RuleChoice(best, scored[best], (*tried, (finalists, again)), tasks)
