"""Reads the directories of runs and evaluations, for one report of them all."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from esper.checkpoints import LOCAL_KEYS, PRETRAINED, find_checkpoint, read_origin
from esper.checkpoints.runs import list_runs, preset_names, read_overrides, read_yaml
from esper.config import grows_hosts, migrate_config, override_key
from esper.evaluation.episode_store import latest_episodes
from esper.evaluation.output import read_provenance
from esper.evaluation.sections import Provenance
from esper.evaluation.training_runs import TrainingRun, run_names
from esper.records import HELD_OUT, EpisodeRecord, read_episodes, read_rounds

RECORDS = ("episodes.jsonl", "rounds.jsonl")
SEPARATE = ("seed", *LOCAL_KEYS)  # keys in which runs may differ and still be repetitions of one another


@dataclass(frozen=True)
class RunInfo:
    """A training run: its task, its overrides, and its lines of rounds.jsonl."""

    task: str
    overrides: Sequence[str]
    rounds: Sequence[Mapping[str, Any]]

    @property
    def settings(self) -> str:
        """All overrides but the run seed."""
        return " ".join(sorted(override for override in self.overrides if override_key(override) not in SEPARATE))

    @property
    def seed(self) -> str:
        return next((o.partition("=")[2] for o in reversed(self.overrides) if override_key(o) == "seed"), "")


@dataclass(frozen=True)
class RunFiles:
    """The files of one directory: episodes and their provenance, and the training run if it is one."""

    directory: Path
    episodes: Sequence[EpisodeRecord]
    provenance: Provenance
    run: RunInfo | None = None


def gather_directory(directory: Path) -> RunFiles:
    """The files of an evaluation or a training run."""
    path, rounds = (directory / name for name in RECORDS)
    if not path.is_file() and not rounds.is_file():
        raise ValueError(
            f"{directory}: holds no episodes.jsonl or rounds.jsonl; it must be the directory of an evaluation or a run."
        )
    lines, complaints = read_episodes(path) if path.is_file() else ([], [])
    if not rounds.is_file() and not any(line.kind is not None for line in lines):
        saved = read_provenance(directory)
        return RunFiles(
            directory,
            latest_episodes(lines),
            Provenance(**{**saved, "remarks": [*complaints, *saved.get("remarks", [])]}),
        )
    overrides, config = read_overrides(directory), _run_config(directory)
    name, hosts = config.get("name", "a run"), "environment" not in config or grows_hosts(config)
    run = RunInfo(f"{name}, {preset_names(directory)}" if hosts else name, overrides, read_rounds(rounds))
    provenance = Provenance(commands=[f"python -m esper.run {shlex.join(overrides)}"], remarks=complaints)
    plain: Any = OmegaConf.to_container(config, resolve=True)
    host = preset_names(directory).partition(" on ")[0]  # of episodes that have no host of their own
    episodes = [
        replace(line, host=line.host or host, config=plain, checkpoint=str(directory), variant=run.settings)
        for line in _last_held_out(lines)
    ]
    return RunFiles(directory, episodes, provenance, run)


def _run_config(directory: Path) -> DictConfig:
    config = read_yaml(directory / ".hydra" / "config.yaml")
    return migrate_config(config) if isinstance(config, DictConfig) else OmegaConf.create()


def read_controller_file(name: str) -> RunFiles:
    """The training run of a controller that was saved as one file."""
    origin = read_origin(find_checkpoint(name))
    run = RunInfo(f"{origin.config.get('name', 'a run')}, {origin.trained_on}", origin.overrides, origin.rounds)
    return RunFiles(Path(name), [], Provenance(commands=[f"python -m esper.run {shlex.join(origin.overrides)}"]), run)


def gather_all(places: Sequence[str]) -> Iterator[RunFiles]:
    """The files of all directories, each once; jobs of a sweep without records become a remark."""
    seen = set()
    for place in places:
        if place in PRETRAINED or Path(place).is_file():
            yield read_controller_file(place)
            continue
        jobs = list_runs(Path(place))
        for job in jobs:
            if job.resolve() in seen:
                continue
            seen.add(job.resolve())
            if len(jobs) > 1 and not any((job / name).is_file() for name in RECORDS):
                yield RunFiles(job, [], Provenance(remarks=[f"{job}: has no records; it is left out."]))
            else:
                yield gather_directory(job.resolve())


def _last_held_out(lines: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """A training run's latest held-out episodes.

    Each run has other held-out seeds, so episodes are numbered instead: a table of several runs has no gaps.
    """
    held_out = [line for line in lines if line.kind in HELD_OUT]
    last = max((line.round or 0 for line in held_out), default=0)
    latest = [line for line in held_out if line.round == last]
    numbers: dict[str | None, dict[int, int]] = {}  # by host, where episodes draw theirs
    for line in latest:
        own = numbers.setdefault(line.host, {})
        own.setdefault(line.episode_seed, len(own))
    return [replace(line, episode_seed=numbers[line.host][line.episode_seed]) for line in latest]


def training_runs(found: Sequence[RunFiles]) -> list[TrainingRun]:
    """The training runs that were found, each named by the overrides in which it differs from the others."""
    runs = [(str(each.directory), each.run) for each in found if each.run is not None and each.run.rounds]
    names = run_names([(directory, run.overrides) for directory, run in runs])
    return [
        TrainingRun(name, run.task, run.rounds, run.settings, run.seed)
        for name, (_, run) in zip(names, runs, strict=True)
    ]


def compared_episodes(found: Sequence[RunFiles]) -> list[EpisodeRecord]:
    """The episodes that arms are compared by: those of evaluations, or, without any, those of training runs."""
    evaluations = [each for each in found if each.run is None and each.episodes]
    if evaluations:
        return [line for each in evaluations for line in each.episodes]
    runs = [(each.run.settings, each) for each in found if each.run is not None]
    several = list(dict.fromkeys(settings for settings, _ in runs))
    names = dict(zip(several, run_names([(settings, settings.split()) for settings in several]), strict=True))
    return [
        replace(line, arm=f"{names[settings] if len(several) > 1 else 'ppo'}, {line.kind}")
        for settings, each in runs
        for line in each.episodes
    ]


def merge_provenance(sources: Sequence[Provenance]) -> Provenance:
    """The provenance of several directories as one."""
    references = {source.reference for source in sources if source.reference}
    return Provenance(
        commands=list(dict.fromkeys(command for source in sources for command in source.commands)),
        versions={name: value for source in reversed(sources) for name, value in source.versions.items()},
        checkpoints={label: about for source in sources for label, about in source.checkpoints.items()},
        remarks=list(dict.fromkeys(remark for source in sources for remark in source.remarks)),
        reference=references.pop() if len(references) == 1 else None,
        search_gflops=max((source.search_gflops for source in sources if source.search_gflops), default=None),
    )
