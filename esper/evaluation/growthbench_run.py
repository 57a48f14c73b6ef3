"""Write the list of instances of GrowthBench, or score an agent or a trained controller against it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from esper.checkpoints import apply_trained_values, checkpoint_names, resolve_checkpoint_paths
from esper.command_line import RECORDS, find_experiment, override_key
from esper.config import compose_config, task_specs
from esper.evaluation.agents import agent_name
from esper.evaluation.document import ReportTable, format_interval
from esper.evaluation.gather import gather_directory
from esper.evaluation.growthbench import (
    BENCHMARK_SPLITS,
    ArmScore,
    InstanceList,
    Standing,
    compare_with_list,
    instance_path,
    load_instances,
    make_instances,
    score_arm,
)
from esper.evaluation.output import make_console
from esper.evaluation.results import ArmResults, base_arm, group_by_task
from esper.evaluation.run import evaluate
from esper.evaluation.statistics import MIN_UNITS
from esper.evaluation.task_means import print_table
from esper.evaluation.task_report import listed_settings
from esper.files import write_file
from esper.records import read_episodes
from esper.tasks import task_digest

SCORES_FILE = "growthbench.json"
FIXED_KEYS = (
    "tasks",
    "tasks.split",
    "split",
    "seed",
    "episodes",
    "controllers",
    "experiment",
    "resume",
)  # that the list sets


def write_instances(name: str, directories: Sequence[Path], path: Path | None) -> Path:
    """Write the list that evaluations give, shipped or to another file; returns the file."""
    found = make_instances(name, [gather_directory(directory) for directory in directories])
    return found.write(path or instance_path(name))


def score_splits(
    name: str, splits: Sequence[str], overrides: Sequence[str], directory: Path, path: Path | None
) -> dict[str, list[Standing]]:
    """Run an agent or a trained controller on the instances of some splits, and print how it compares with every arm.

    Arguments:
        name: of the distribution
        splits: to run; empty is all that the list has
        overrides: `agent=module:Class` or `ckpt=...`, and other keys of `esper.evaluate`
        directory: of the evaluations; finished episodes in it do not run again
        path: of the list; None is the shipped one
    """
    instances, console = load_instances(name, path), make_console()
    chosen = list(splits) or [split for split in BENCHMARK_SPLITS if instances.of_split(split)]
    for split in chosen:
        if not instances.of_split(split):
            raise ValueError(f"--split {split}: must be one of {', '.join(instances.counts)}, which the list has.")
    configs = {split: _compose(instances, split, overrides) for split in chosen}
    standings, scores = {}, {}
    for split, (config, every) in configs.items():
        own = directory / split
        own.mkdir(parents=True, exist_ok=True)
        evaluate(config, own, console, overrides=every)
        scores[split] = _read_scores(instances, split, own, _arm_of(config))
        standings[split] = compare_with_list(scores[split], instances.of_split(split))
        print_standings(standings[split], scores[split], f"{name}, {split}: {_arm_of(config)}", console)
    write_file(directory / SCORES_FILE, json.dumps(_to_plain(instances, scores, standings), indent=2))
    console.print(f"{directory / SCORES_FILE}", soft_wrap=True)
    return standings


def _compose(instances: InstanceList, split: str, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The evaluation of an agent or a controller on the episode seeds of a list, and all its overrides."""
    for override in overrides:
        key = override_key(override)
        if key in FIXED_KEYS or key == f"tasks.counts.{split}":
            raise ValueError(f"{override}: must not be typed, as the list of instances sets {key}.")
    typed = {override_key(override): override.partition("=")[2] for override in overrides}
    if ("agent" in typed) == ("ckpt" in typed):
        raise ValueError("agent, ckpt: exactly one of them must be typed, such as agent=my_agent:MyAgent.")
    arm = typed["agent"].rpartition(":")[2] if "agent" in typed else "ppo"
    own = [
        f"+experiment={find_experiment(instances.name)}", f"tasks={instances.name}", f"tasks.split={split}",
        f"tasks.counts.{split}={instances.counts[split]}", f"seed={instances.seed}",
        f"episodes={instances.episodes * len(instances.of_split(split))}", f"controllers=[{arm}]",
    ]  # fmt: skip
    every = [*own, *resolve_checkpoint_paths(list(overrides))]
    config = compose_config("evaluate", every)
    config = apply_trained_values(config, every, checkpoint_names(config.ckpt))
    settings = listed_settings(config)
    for key, value in instances.settings.items():
        if settings.get(key) != value:
            raise ValueError(
                f"{key}={settings.get(key)}: must be {value}, as scores of the list were measured with it."
            )
    digests = {spec.name: task_digest(spec) for spec in task_specs(config)}
    for instance in instances.of_split(split):
        if digests.get(instance.name) != instance.digest:
            raise ValueError(f"{instance.name}: must be the task that the list was measured on, but it has changed.")
    return config, every


def _arm_of(config: DictConfig) -> str:
    return agent_name(config) or "ppo"


def _read_scores(instances: InstanceList, split: str, directory: Path, arm: str) -> dict[str, ArmScore]:
    """The scores of the agent by instance; controllers that were trained differently count as one agent."""
    episodes, _ = read_episodes(directory / RECORDS)
    tasks = {task.host: task for task in group_by_task(episodes)[0]}
    scores = {}
    for instance in instances.of_split(split):
        merged = ArmResults(arm)
        for name, results in tasks[instance.name].arms.items() if instance.name in tasks else ():
            if base_arm(name) == arm:
                merged.by_key |= results.by_key
        if len(merged.by_key) < instances.episodes * max(1, len(merged.checkpoints)):
            raise ValueError(
                f"{directory}: {instance.name} has unfinished episodes; the same command with --out {directory.parent} "
                "continues."
            )
        scores[instance.name] = score_arm(merged)
    return scores


def print_standings(
    standings: Sequence[Standing], scores: Mapping[str, ArmScore], title: str, console: Console
) -> None:
    """A row for each arm: its score, and how far the agent is above it."""
    rows = [
        [one.arm, f"{one.score:.2f}", format_interval(one.difference, "{:+.2f}"), f"{one.above} of {one.instances}"]
        for one in standings
    ]
    total = sum(score.mean for score in scores.values()) / len(scores)
    print_table(
        ReportTable(("arm", "score", "agent - arm", "agent is above on"), rows), f"{title}: {total:.2f}", console
    )
    if len(scores) < MIN_UNITS:
        console.print(f"With fewer than {MIN_UNITS} instances, an interval is little more than a guess.")


def _to_plain(
    instances: InstanceList, scores: Mapping[str, Mapping[str, ArmScore]], standings: Mapping[str, Sequence[Standing]]
) -> dict[str, object]:
    rows = {split: {one.arm: asdict(one) for one in own} for split, own in standings.items()}
    for split, own in standings.items():
        for one in own:
            rows[split][one.arm]["difference"] = one.difference.to_dict()
    scored = {split: {task: asdict(score) for task, score in own.items()} for split, own in scores.items()}
    return {"name": instances.name, "scores": scored, "compared": rows}
