"""Finished episodes, sorted into tasks and arms, and the figures that are taken from them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from esper.evaluation.arms import ARMS
from esper.evaluation.statistics import Estimate, Strata, estimate
from esper.records import EpisodeRecord

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
class ArmResults:
    """An arm's episodes in a task, by learner and seed."""

    arm: str
    lines: dict[tuple[str | None, int], EpisodeRecord] = field(default_factory=dict)

    @property
    def checkpoints(self) -> list[str | None]:
        return sorted({checkpoint for checkpoint, _ in self.lines}, key=str)

    @property
    def episode_seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.lines})

    @property
    def played(self) -> str:
        """Controllers x seeds, and how many episodes that are if some are missing."""
        square = f"{len(self.checkpoints)} x {len(self.episode_seeds)}"
        whole = len(self.lines) == len(self.checkpoints) * len(self.episode_seeds)
        return square if whole else f"{len(self.lines)} of {square}"

    def table(self, key: str, seeds: Sequence[int] | None = None) -> np.ndarray:
        """A figure of its episodes: [learners, seeds]; NaN is not played, or not measured."""
        columns = self.episode_seeds if seeds is None else seeds
        rows = [
            [getattr(self.lines.get((checkpoint, seed)), key, None) for seed in columns]
            for checkpoint in self.checkpoints
        ]
        return np.array(rows, dtype=float)

    def figure(self, title: str) -> Estimate | None:
        """One of FIGURES, with its interval; None where it was not measured in every episode."""
        key, _, factor = FIGURES[title]
        if any(getattr(line, key) is None for line in self.lines.values()):
            return None
        return estimate([self.table(key) * factor])

    def median(self) -> EpisodeRecord:
        """The episode whose score is in the middle."""
        lines = sorted(self.lines.values(), key=final_score)
        return lines[len(lines) // 2]


@dataclass
class TaskResults:
    """Episodes that can be compared: the same host, data and budget."""

    name: str
    split: str  # test or validation
    config: Mapping[str, Any]
    arms: dict[str, ArmResults] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.split} split"

    @property
    def text(self) -> bool:
        return "vocabulary" in self.config.get("data", {})

    def lines(self) -> list[EpisodeRecord]:
        return [line for results in self.arms.values() for line in results.lines.values()]


def group_by_task(lines: Sequence[EpisodeRecord]) -> tuple[list[TaskResults], list[str]]:
    """Episodes by task and arm, in the order of the arms' table, and a sentence for each thing that is not as usual."""
    tasks: dict[str, TaskResults] = {}
    remarks: list[str] = []
    rules: dict[tuple[int, str], list[str]] = {}  # unlike settings of one arm
    for line in lines:
        config = line.config
        drawn = line.host if "hosts" in (config.get("host") or {}) else None
        key = json.dumps([line.data, line.split, drawn, _essence(config)], sort_keys=True)
        task = tasks.setdefault(key, TaskResults(f"{line.host or 'a host'} on {line.data}", line.split, config))
        known = rules.setdefault((id(task), line.arm), [])
        if line.variant not in known:
            known.append(line.variant)
        number = known.index(line.variant)
        arm = line.arm if number == 0 else f"{line.arm} ({number + 1})"
        results = task.arms.setdefault(arm, ArmResults(arm))
        place = (line.checkpoint, line.episode_seed)
        if place in results.lines and results.lines[place].score != line.score:
            remarks.append(
                f"{task.title}: {arm} ran twice on episode seed {line.episode_seed}, with different scores; "
                "the last is used."
            )
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


def _complete(task: TaskResults) -> list[str]:
    """Give a score to episodes whose network ended without one, the lowest there is, and say so."""
    known = [line for line in task.lines() if line.score is not None]
    worst = {
        key: min((value for line in known if (value := getattr(line, key)) is not None), default=0.0) for key in RATED
    }
    remarks = []
    for results in task.arms.values():
        for place, line in results.lines.items():
            if line.score is None:
                lowest: dict[str, Any] = {key: worst[key] for key in _scores_of(line)}
                results.lines[place] = replace(line, **lowest)
                remarks.append(
                    f"{task.title}: {results.arm} on episode seed {line.episode_seed} ended with non-finite values; "
                    f"it counts as the lowest score of all arms, {worst['score']:.2f}."
                )
    return remarks


def _scores_of(line: EpisodeRecord) -> tuple[str, ...]:
    """The scores that were measured: a training run's episodes have no others."""
    if line.kind is not None:
        return ("score",)
    return RATED if line.split == "test" else ("score", "selection_score")


def final_score(line: EpisodeRecord) -> float:
    """Sorts episodes; one without a score comes first."""
    return float("-inf") if line.score is None else line.score


def _distinct(tasks: list[TaskResults]) -> list[TaskResults]:
    """Tasks of the same name get numbers."""
    for task in tasks:
        alike = [other for other in tasks if other.title == task.title]
        if len(alike) > 1:
            for number, other in enumerate(alike, 1):
                other.name = f"{other.name} ({number})"
    return tasks


def paired_values(
    ours: Sequence[ArmResults], theirs: Sequence[ArmResults], key: str = "score"
) -> tuple[Strata, Strata]:
    """A figure of two arms in some tasks, on the seeds that both have played in each.

    Arms of the same trained controllers are paired by controller; of others, each is compared with every other.
    """
    pairs = []
    for mine, other in zip(ours, theirs, strict=True):
        seeds = sorted(set(mine.episode_seeds) & set(other.episode_seeds))
        if seeds:
            ours_here, theirs_here = mine.table(key, seeds), other.table(key, seeds)
            if mine.checkpoints != other.checkpoints and 1 not in (len(mine.checkpoints), len(other.checkpoints)):
                ours_here, theirs_here = np.broadcast_arrays(ours_here[:, None], theirs_here[None])
            pairs.append((ours_here, theirs_here))
    return [mine for mine, _ in pairs], [other for _, other in pairs]
