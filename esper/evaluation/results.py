"""Finished episodes by task and arm, and the estimates that are made from them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from esper.blueprints import blueprints, topologies
from esper.evaluation.arms import ARMS, base_name
from esper.evaluation.statistics import Estimate, Strata, estimate, mean, worst_tenth
from esper.records import EpisodeRecord
from esper.tasks import TASK_NAME

TASK_GROUPS = ("host", "data", "tasks", "environment", "optimizer", "lifecycle", "slots", "actions", "governor")
IGNORED_KEYS = {"environment": ("envs", "threads", "workers"), "data": ("device", "root")}  # do not change an episode
SCORE_FIELDS = ("score", "test_score", "selection_score", "validation_score")
BARE_HOST = "none"  # the arm that failures are judged by
FAILURE_MARGIN = 3.0  # points below the bare host on the same episode seed; equal arms seldom differ by as much
RESULT_METRICS = {  # title -> (field of a record, format, factor)
    "score": ("score", "{:.2f}", 1.0),
    "test": ("test_score", "{:.2f}", 1.0),
    "parameters": ("parameters", "{:,.0f}", 1.0),
    "GFLOPs": ("flops", "{:,.1f}", 1e-9),
    "seconds": ("seconds", "{:.1f}", 1.0),
}


@dataclass
class ArmResults:
    """An arm's episodes in a task, by checkpoint and episode seed."""

    arm: str
    by_key: dict[tuple[str | None, int], EpisodeRecord] = field(default_factory=dict)
    non_finite: set[tuple[str | None, int]] = field(default_factory=set)  # episodes that ended with such values

    @property
    def episodes(self) -> list[EpisodeRecord]:
        return list(self.by_key.values())

    @property
    def checkpoints(self) -> list[str | None]:
        return sorted({checkpoint for checkpoint, _ in self.by_key}, key=str)

    @property
    def episode_seeds(self) -> list[int]:
        return sorted({episode_seed for _, episode_seed in self.by_key})

    @property
    def count_text(self) -> str:
        """Controllers x episode seeds, and the number of episodes if some are missing."""
        product = f"{len(self.checkpoints)} x {len(self.episode_seeds)}"
        is_complete = len(self.by_key) == len(self.checkpoints) * len(self.episode_seeds)
        return product if is_complete else f"{len(self.by_key)} of {product}"

    def values(self, name: str, episode_seeds: Sequence[int] | None = None) -> np.ndarray:
        """A record field of its episodes: [controllers, episode seeds]; NaN where it is missing."""
        columns = self.episode_seeds if episode_seeds is None else episode_seeds
        rows = [
            [getattr(self.by_key.get((checkpoint, episode_seed)), name, None) for episode_seed in columns]
            for checkpoint in self.checkpoints
        ]
        return np.array(rows, dtype=float)

    def estimate_of(self, title: str) -> Estimate | None:
        """One of RESULT_METRICS with its interval; None if an episode has not measured it."""
        name, _, factor = RESULT_METRICS[title]
        return estimate([self.values(name) * factor]) if self.has_measured(name) else None

    def has_measured(self, name: str) -> bool:
        """Whether all its episodes have this record field."""
        return all(getattr(episode, name) is not None for episode in self.episodes)

    def median_episode(self) -> EpisodeRecord:
        """The episode with the median score."""
        episodes = sorted(self.episodes, key=final_score)
        return episodes[len(episodes) // 2]


@dataclass(frozen=True)
class ScoreSummary:
    """What an interquartile mean hides: the mean, the worst tenth of episodes, and the share of failures."""

    mean: Estimate
    worst_tenth: float
    failure_rate: float


@dataclass
class TaskResults:
    """Episodes that can be compared: the same host, data and budget."""

    name: str
    split: str  # test or validation
    config: Mapping[str, Any]
    arms: dict[str, ArmResults] = field(default_factory=dict)
    host: str | None = None  # of one of several hosts; in a task distribution, the name of the task

    @property
    def family(self) -> str | None:
        """Of a task of a distribution: what its host lacks. Of one of several hosts, its name."""
        drawn = TASK_NAME.fullmatch(self.host or "")
        return drawn["family"] if drawn and _has_distribution(self.config) else self.host

    @property
    def task_split(self) -> str | None:
        """The split of a task of a distribution."""
        drawn = TASK_NAME.fullmatch(self.host or "")
        return drawn["split"] if drawn and _has_distribution(self.config) else None

    @property
    def title(self) -> str:
        return f"{self.name}, {self.split} split"

    @property
    def measured_field(self) -> str:
        """The record field that a score is derived from by subtracting the rent."""
        return f"{self.split}_score"

    @property
    def rent(self) -> float:
        """The weight of ln(parameters / host parameters) in scores."""
        return float((self.config.get("environment") or {}).get("rent", 1.0))

    @property
    def is_text(self) -> bool:
        return "vocabulary" in self.config.get("data", {})

    @property
    def episodes(self) -> list[EpisodeRecord]:
        return [episode for results in self.arms.values() for episode in results.episodes]

    def summarise(self, arm: str) -> ScoreSummary:
        results = self.arms[arm]
        scores = results.values("score")
        return ScoreSummary(estimate([scores], mean), float(worst_tenth(scores.ravel())), self._failure_rate(results))

    def _failure_rate(self, results: ArmResults) -> float:
        """The share of episodes with non-finite values, or far below the bare host on the same episode seed."""
        bare = self.arms[BARE_HOST].by_key if BARE_HOST in self.arms else {}
        failures = 0
        for key, episode in results.by_key.items():
            other = bare.get((None, episode.episode_seed))
            is_low = other is not None and final_score(episode) < final_score(other) - FAILURE_MARGIN
            failures += key in results.non_finite or is_low
        return failures / len(results.by_key)


def group_by_task(episodes: Sequence[EpisodeRecord]) -> tuple[list[TaskResults], list[str]]:
    """Episodes by task and arm, in the order of ARMS, and remarks about what a reader would not expect."""
    tasks: dict[str, TaskResults] = {}
    remarks: list[str] = []
    variants: dict[tuple[int, str], list[str]] = {}  # of each arm of a task
    for episode in episodes:
        task = _find_task(tasks, episode)
        known = variants.setdefault((id(task), episode.arm), [])
        if episode.variant not in known:
            known.append(episode.variant)
        number = known.index(episode.variant)
        arm = episode.arm if number == 0 else f"{episode.arm} ({number + 1})"
        results = task.arms.setdefault(arm, ArmResults(arm))
        key = (episode.checkpoint, episode.episode_seed)
        if key in results.by_key and results.by_key[key].score != episode.score:
            remarks.append(
                f"{task.title}: {arm} ran twice on episode seed {episode.episode_seed}, with different scores; "
                "the last is used."
            )
        results.by_key[key] = episode
    order = {name: index for index, name in enumerate(ARMS)}
    for task in tasks.values():
        remarks += [f"{task.title}: {arm} has other settings than the first {base_arm(arm)}."
                    for arm in task.arms if arm != base_arm(arm)]  # fmt: skip
        remarks += _fill_missing_scores(task)
        task.arms = dict(
            sorted(task.arms.items(), key=lambda item: order.get(base_name(base_arm(item[0])), len(order)))
        )
    return _number_equal_titles(list(tasks.values())), remarks


def base_arm(name: str) -> str:
    """The name of an arm without the number of its variant."""
    return name.partition(" (")[0]


def _find_task(tasks: dict[str, TaskResults], episode: EpisodeRecord) -> TaskResults:
    """The task of an episode, which is added if it is new."""
    config = episode.config
    draws_host = "hosts" in (config.get("host") or {}) or _has_distribution(config)
    drawn_host = episode.host if draws_host else None
    key = json.dumps([episode.data, episode.split, drawn_host, _task_config(config)], sort_keys=True)
    name = f"{episode.host or 'a host'} on {episode.data}"
    return tasks.setdefault(key, TaskResults(name, episode.split, config, host=drawn_host))


def _task_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that must be equal for episodes to be compared."""
    groups: dict[str, Any] = {}
    for group in TASK_GROUPS:
        part = config.get(group)
        ignored = IGNORED_KEYS.get(group, ())
        groups[group] = {k: v for k, v in part.items() if k not in ignored} if isinstance(part, dict) else part
    if not _has_distribution(config):
        groups["tasks"] = None  # host and data are the only task
    slots = groups["slots"]
    if isinstance(slots, dict) and slots.get("blueprints") in [list(blueprints(name)) for name in topologies()]:
        slots["blueprints"] = None  # records of version 2 have null for all blueprints
    return groups


def _has_distribution(config: Mapping[str, Any]) -> bool:
    """Whether the host of an episode was drawn from a task distribution."""
    return "_target_" in (config.get("tasks") or {})


def _fill_missing_scores(task: TaskResults) -> list[str]:
    """Give the lowest score of all arms to episodes whose network ended with non-finite values; returns remarks."""
    scored = [episode for episode in task.episodes if episode.score is not None]
    lowest = {
        name: min((value for episode in scored if (value := getattr(episode, name)) is not None), default=0.0)
        for name in SCORE_FIELDS
    }
    remarks = []
    for results in task.arms.values():
        for key, episode in results.by_key.items():
            if episode.score is None:
                results.non_finite.add(key)
                scores: dict[str, Any] = {name: lowest[name] for name in _measured_scores(episode)}
                results.by_key[key] = replace(episode, **scores)
                remarks.append(
                    f"{task.title}: {results.arm} on episode seed {episode.episode_seed} ended with non-finite values; "
                    f"it counts as the lowest score of all arms, {lowest['score']:.2f}."
                )
    return remarks


def _measured_scores(episode: EpisodeRecord) -> tuple[str, ...]:
    """The score fields that an episode of its kind has."""
    if episode.kind is not None:
        return ("score", "validation_score")
    return tuple(name for name in SCORE_FIELDS if episode.split == "test" or name != "test_score")


def final_score(episode: EpisodeRecord) -> float:
    """For sorting; an episode without a score comes first."""
    return float("-inf") if episode.score is None else episode.score


def _number_equal_titles(tasks: list[TaskResults]) -> list[TaskResults]:
    for task in tasks:
        equal = [other for other in tasks if other.title == task.title]
        if len(equal) > 1:
            for number, other in enumerate(equal, 1):
                other.name = f"{other.name} ({number})"
    return tasks


def paired_values(
    ours: Sequence[ArmResults], theirs: Sequence[ArmResults], name: str = "score"
) -> tuple[Strata, Strata]:
    """A record field of two arms in each task, on the episode seeds that both arms have.

    Arms with the same trained controllers are paired by controller. If both have several and they are different, each
    is compared with every other.
    """
    pairs = []
    for our_arm, their_arm in zip(ours, theirs, strict=True):
        episode_seeds = sorted(set(our_arm.episode_seeds) & set(their_arm.episode_seeds))
        if episode_seeds:
            mine, other = our_arm.values(name, episode_seeds), their_arm.values(name, episode_seeds)
            if our_arm.checkpoints != their_arm.checkpoints and 1 not in (len(mine), len(other)):
                mine, other = np.broadcast_arrays(mine[:, None], other[None])
            pairs.append((mine, other))
    return [mine for mine, _ in pairs], [other for _, other in pairs]
