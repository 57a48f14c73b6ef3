"""Finished episodes, sorted into tasks and arms, and the figures that are taken from them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from esper.evaluation.arms import ARMS
from esper.evaluation.statistics import Estimate, Strata, estimate

SAME = ("host", "data", "environment", "optimizer", "lifecycle", "slots", "actions", "governor")  # make a task
FREE = {"environment": ("envs", "threads"), "data": ("device", "root")}  # change nothing in an episode
RATED = ("score", "test_score", "selection_score")
FIGURES = {  # title -> (key of an episode, format, factor)
    "score": ("score", "{:.2f}", 1.0),
    "test": ("test_score", "{:.2f}", 1.0),
    "parameters": ("parameters", "{:,.0f}", 1.0),
    "GFLOPs": ("flops", "{:,.1f}", 1e-9),
    "seconds": ("seconds", "{:.1f}", 1.0),
}


@dataclass
class Results:
    """An arm's episodes in a task, by learner and seed."""

    arm: str
    lines: dict[tuple[str | None, int], Mapping[str, Any]] = field(default_factory=dict)

    @property
    def learners(self) -> list[str | None]:
        return sorted({learner for learner, _ in self.lines}, key=str)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.lines})

    @property
    def played(self) -> str:
        """Controllers x seeds, and how many episodes that are if some are missing."""
        square = f"{len(self.learners)} x {len(self.seeds)}"
        whole = len(self.lines) == len(self.learners) * len(self.seeds)
        return square if whole else f"{len(self.lines)} of {square}"

    def table(self, key: str, seeds: Sequence[int] | None = None) -> np.ndarray:
        """A figure of its episodes: [learners, seeds]; NaN is not played, or not measured."""
        columns = self.seeds if seeds is None else seeds
        rows = [[self.lines.get((learner, seed), {}).get(key) for seed in columns] for learner in self.learners]
        return np.array(rows, dtype=float)

    def figure(self, title: str) -> Estimate | None:
        """One of FIGURES, with its interval; None where it was not measured in every episode."""
        key, _, factor = FIGURES[title]
        if any(line.get(key) is None for line in self.lines.values()):
            return None
        return estimate([self.table(key) * factor])

    def median(self) -> Mapping[str, Any]:
        """The episode whose score is in the middle."""
        lines = sorted(self.lines.values(), key=lambda line: line["score"])
        return lines[len(lines) // 2]


@dataclass
class Task:
    """Episodes that can be compared: the same host, data and budget."""

    name: str
    split: str  # test or validation
    config: Mapping[str, Any]
    arms: dict[str, Results] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.split} split"

    @property
    def text(self) -> bool:
        return "vocabulary" in self.config.get("data", {})

    def lines(self) -> list[Mapping[str, Any]]:
        return [line for results in self.arms.values() for line in results.lines.values()]


def sort(lines: Sequence[Mapping[str, Any]]) -> tuple[list[Task], list[str]]:
    """Episodes by task and arm, in the order of the arms' table, and a sentence for each thing that is not as usual."""
    tasks: dict[str, Task] = {}
    remarks: list[str] = []
    rules: dict[tuple[int, str], list[str]] = {}  # unlike settings of one arm
    for line in lines:
        split = "test" if "test_score" in line else "validation"
        config = line.get("config", {})
        drawn = line.get("host") if "hosts" in (config.get("host") or {}) else None
        key = json.dumps([line["data"], split, drawn, _essence(config)], sort_keys=True)
        task = tasks.setdefault(key, Task(f"{line.get('host', 'a host')} on {line['data']}", split, config))
        known = rules.setdefault((id(task), line["controller"]), [])
        if line.get("rule", "") not in known:
            known.append(line.get("rule", ""))
        number = known.index(line.get("rule", ""))
        arm = line["controller"] if number == 0 else f"{line['controller']} ({number + 1})"
        results = task.arms.setdefault(arm, Results(arm))
        place = (line.get("learner"), line["seed"])
        if place in results.lines and results.lines[place]["score"] != line["score"]:
            told = f"{arm} was played twice on seed {line['seed']}, with unlike scores; the last is taken."
            remarks.append(f"{task.title}: {told}")
        results.lines[place] = line
    for task in tasks.values():
        remarks += [f"{task.title}: {arm} has other settings than its namesake." for arm in task.arms if "(" in arm]
        remarks += _complete(task)
        order = {name: index for index, name in enumerate(ARMS)}
        task.arms = dict(sorted(task.arms.items(), key=lambda item: order.get(item[0].split(" (")[0], len(order))))
    return _distinct(list(tasks.values())), remarks


def _essence(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal for episodes to be compared."""
    found = {}
    for group in SAME:
        part = config.get(group)
        found[group] = (
            {k: v for k, v in part.items() if k not in FREE.get(group, ())} if isinstance(part, dict) else part
        )
    return found


def _complete(task: Task) -> list[str]:
    """Give a score to episodes whose network ended without one, the lowest there is, and say so."""
    known = [line for line in task.lines() if line["score"] is not None]
    worst = {key: min((line[key] for line in known if line.get(key) is not None), default=0.0) for key in RATED}
    remarks = []
    for results in task.arms.values():
        for place, line in results.lines.items():
            if line["score"] is None:
                results.lines[place] = {**line, **{key: worst[key] for key in RATED if key in line}}
                remarks.append(
                    f"{task.title}: {results.arm} on seed {line['seed']} ended with a network that is not finite; "
                    f"it counts as the lowest score of all arms, {worst['score']:.2f}."
                )
    return remarks


def _distinct(tasks: list[Task]) -> list[Task]:
    """Tasks of the same name get numbers."""
    for task in tasks:
        alike = [other for other in tasks if other.title == task.title]
        if len(alike) > 1:
            for number, other in enumerate(alike, 1):
                other.name = f"{other.name} ({number})"
    return tasks


def shared(ours: Sequence[Results], theirs: Sequence[Results], key: str = "score") -> tuple[Strata, Strata]:
    """A figure of two arms in some tasks, on the seeds that both have played in each.

    Arms of the same trained controllers are paired by controller; of others, each is compared with every other.
    """
    pairs = []
    for mine, other in zip(ours, theirs, strict=True):
        seeds = sorted(set(mine.seeds) & set(other.seeds))
        if seeds:
            ours_here, theirs_here = mine.table(key, seeds), other.table(key, seeds)
            if mine.learners != other.learners and 1 not in (len(mine.learners), len(other.learners)):
                ours_here, theirs_here = np.broadcast_arrays(ours_here[:, None], theirs_here[None])
            pairs.append((ours_here, theirs_here))
    return [mine for mine, _ in pairs], [other for _, other in pairs]
