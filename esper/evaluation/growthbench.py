"""GrowthBench: instances of a task distribution, and what every arm of a finished evaluation scores on each.

A list of instances is a small JSON file in the directory `instances` of this package. It is written from evaluations,
and other agents and controllers are scored against it on the same episode seeds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from esper.config import build_distribution
from esper.evaluation.arms import get_arm
from esper.evaluation.gather import RunFiles
from esper.evaluation.results import ArmResults, TaskResults, base_arm, group_by_task
from esper.evaluation.statistics import Estimate, estimate, mean
from esper.evaluation.task_report import listed_settings
from esper.files import write_file
from esper.tasks import task_digest

INSTANCE_LISTS = Path(__file__).parent / "instances"
BENCHMARK_SPLITS = ("test", "heldout")  # whose tasks no controller is trained on
LIST_FORMAT = 1
DIGITS = 3  # of written scores


@dataclass(frozen=True)
class ArmScore:
    """The test scores of an arm on an instance."""

    mean: float
    spread: float  # standard deviation over episodes
    episodes: int  # controllers x episode seeds
    controllers: int  # trained ones; 0 for an arm without


@dataclass(frozen=True)
class Instance:
    """A task, and what arms score on it."""

    name: str
    family: str
    split: str
    digest: str  # of the settings of the task; an instance whose settings have changed is another one
    arms: Mapping[str, ArmScore]


@dataclass(frozen=True)
class InstanceList:
    """The instances of a distribution.

    Arguments:
        name: of the distribution
        instances: its tasks, of splits that no controller is trained on
        counts: by split, the number of tasks that the evaluation drew from: episode seeds depend on it
        episodes: episode seeds of each instance
        seed: that the episode seeds are derived from
        settings: keys of the configuration that all scores depend on besides the tasks, with their values
        arms: by name, what each arm is
    """

    name: str
    instances: Sequence[Instance]
    counts: Mapping[str, int]
    episodes: int
    seed: int
    settings: Mapping[str, Any]
    arms: Mapping[str, str]

    def of_split(self, split: str) -> list[Instance]:
        return [instance for instance in self.instances if instance.split == split]

    def write(self, path: Path) -> Path:
        """Write the list, one line for each instance; returns the path."""
        head = {key: value for key, value in vars(self).items() if key != "instances"}
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in {"format": LIST_FORMAT, **head}.items()]
        rows = ",\n".join(json.dumps(asdict(instance)) for instance in self.instances)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, "{" + ",\n".join([*lines, f'"instances": [\n{rows}\n]']) + "}\n")
        return path

    @classmethod
    def load(cls, path: Path) -> "InstanceList":
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format", None) != LIST_FORMAT:
            raise ValueError(f"{path}: must be a list of instances in format {LIST_FORMAT}.")
        instances = [
            Instance(**{**each, "arms": {arm: ArmScore(**score) for arm, score in each["arms"].items()}})
            for each in data.pop("instances")
        ]
        return cls(instances=instances, **data)


def instance_path(name: str) -> Path:
    """The file of a distribution's shipped list."""
    return INSTANCE_LISTS / f"{name}.json"


def load_instances(name: str, path: Path | None = None) -> InstanceList:
    """The list of a distribution, shipped or in a file."""
    own = path or instance_path(name)
    if not own.is_file():
        raise ValueError(
            f"{own}: there is no list of instances; python -m esper.growthbench {name} --write DIR writes it from the "
            "evaluation in DIR."
        )
    found = InstanceList.load(own)
    if found.name != name:
        raise ValueError(f"{own}: must be a list of {name}, but is one of {found.name}.")
    return found


def make_instances(name: str, sources: Sequence[RunFiles]) -> InstanceList:
    """The list that finished evaluations of a distribution give.

    Arguments:
        name: of the distribution
        sources: the directories of evaluations, at most one for each split
    """
    instances: list[Instance] = []
    counts: dict[str, int] = {}
    common: tuple[int, int, dict[str, Any]] | None = None
    for source in sources:
        tasks, _ = group_by_task(source.episodes)
        config = _check_evaluation(name, source, tasks)
        split = str(config.tasks.split)
        if split in counts:
            raise ValueError(f"{source.directory}: must have tasks of another split than {split}, which is there.")
        counts[split] = int(config.tasks.counts[split])
        own = (_episodes_of(source, tasks), int(config.seed), listed_settings(config))
        if common is not None and own != common:
            raise ValueError(
                f"{source.directory}: must have the episodes, seed and settings of {sources[0].directory}."
            )
        common = own
        digests = _digests(config)
        instances += [_make_instance(task, digests[str(task.host)]) for task in tasks]
    if common is None:
        raise ValueError("--write: must name the directory of an evaluation.")
    names = dict.fromkeys(arm for instance in instances for arm in instance.arms)
    arms = {arm: get_arm(base_arm(arm)).description for arm in names}
    ordered = sorted(instances, key=lambda instance: (BENCHMARK_SPLITS.index(instance.split), instance.name))
    return InstanceList(name, ordered, counts, common[0], common[1], common[2], arms)


def _check_evaluation(name: str, source: RunFiles, tasks: Sequence[TaskResults]) -> DictConfig:
    """The configuration of a finished evaluation on tasks of a distribution, with the name of a split to judge by."""
    if not tasks:
        raise ValueError(f"{source.directory}: must have finished episodes.")
    config = OmegaConf.create(dict(tasks[0].config))
    if config.get("tasks", {}).get("name") != name or config.tasks.split not in BENCHMARK_SPLITS:
        raise ValueError(
            f"{source.directory}: must be an evaluation with tasks={name} and split={' or '.join(BENCHMARK_SPLITS)}."
        )
    missing = set(_digests(config)) - {str(task.host) for task in tasks}
    if missing:
        raise ValueError(f"{source.directory}: must have episodes of every task, but has none of {min(missing)}.")
    return config


def _episodes_of(source: RunFiles, tasks: Sequence[TaskResults]) -> int:
    """The number of episode seeds, which every arm must have on every task."""
    arms = {(task.host, arm): results for task in tasks for arm, results in task.arms.items()}
    names = {arm for _, arm in arms}
    seeds = max(len(results.episode_seeds) for results in arms.values())
    for task in tasks:
        for arm in sorted(names):
            results = arms.get((task.host, arm), ArmResults(arm))
            wanted = seeds * max(1, len(results.checkpoints))
            if len(results.by_key) < wanted:
                raise ValueError(
                    f"{source.directory}: must be a finished evaluation, but {arm} has {len(results.by_key)} of "
                    f"{wanted} episodes on {task.host}."
                )
    return seeds


def _digests(config: DictConfig) -> dict[str, str]:
    """The digest of each task of the evaluated split."""
    distribution = build_distribution(config)
    assert distribution is not None
    return {spec.name: task_digest(spec) for spec in distribution.specs(distribution.split)}


def _make_instance(task: TaskResults, digest: str) -> Instance:
    assert task.host is not None
    assert task.family is not None
    assert task.task_split is not None
    arms = {arm: score_arm(results) for arm, results in task.arms.items()}
    return Instance(task.host, task.family, task.task_split, digest, arms)


def score_arm(results: ArmResults) -> ArmScore:
    """The mean score of an arm's episodes on one task, and their spread."""
    scores = results.values("score").ravel()
    spread = float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0
    controllers = sum(checkpoint is not None for checkpoint in results.checkpoints)
    return ArmScore(round(float(np.mean(scores)), DIGITS), round(spread, DIGITS), len(scores), controllers)


@dataclass(frozen=True)
class Standing:
    """How an agent compares with an arm of the list."""

    arm: str
    score: float  # of the arm, mean over instances
    difference: Estimate  # of the agent's scores, over instances
    above: int  # instances on which the agent scores more
    instances: int


def compare_with_list(scores: Mapping[str, ArmScore], instances: Sequence[Instance]) -> list[Standing]:
    """The agent, whose scores are by name of the instance, compared with every arm; the best arm first."""
    found = []
    for arm in dict.fromkeys(arm for instance in instances for arm in instance.arms):
        pairs = [(scores[each.name].mean, each.arms[arm].mean) for each in instances if arm in each.arms]
        strata = [np.array([[ours - theirs]]) for ours, theirs in pairs]
        above = sum(ours > theirs for ours, theirs in pairs)
        found.append(Standing(arm, fmean(theirs for _, theirs in pairs), estimate(strata, mean), above, len(pairs)))
    return sorted(found, key=lambda standing: -standing.score)
