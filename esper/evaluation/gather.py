"""Read the directories of runs and evaluations for one report."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from esper.checkpoints import LOCAL_KEYS, read_origin
from esper.checkpoints.runs import list_runs, preset_names, read_overrides, read_yaml
from esper.command_line import override_key
from esper.config import grows_hosts, migrate_config
from esper.controllers import PRETRAINED, find_checkpoint
from esper.evaluation.episode_store import latest_episodes
from esper.evaluation.provenance import Provenance, read_provenance
from esper.evaluation.training_runs import TrainingRun, run_names
from esper.records import HELD_OUT, EpisodeRecord, read_episodes, read_rounds

RECORD_FILES = ("episodes.jsonl", "rounds.jsonl")
REPETITION_KEYS = ("seed", *LOCAL_KEYS)  # runs that differ only in these are repetitions of one another


@dataclass(frozen=True)
class RunInfo:
    """A training run: its task, its overrides, and its lines of rounds.jsonl."""

    task: str
    overrides: Sequence[str]
    rounds: Sequence[Mapping[str, Any]]

    @property
    def settings(self) -> str:
        """All overrides but the run seed and keys of one machine."""
        return " ".join(sorted(o for o in self.overrides if override_key(o) not in REPETITION_KEYS))

    @property
    def run_seed(self) -> str:
        """The value of the override `seed`; empty without one."""
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
    episode_path, round_path = (directory / name for name in RECORD_FILES)
    if not episode_path.is_file() and not round_path.is_file():
        raise ValueError(f"{directory}: must be an evaluation or a run with episodes.jsonl or rounds.jsonl.")
    episodes, read_errors = read_episodes(episode_path) if episode_path.is_file() else ([], [])
    if not round_path.is_file() and all(episode.kind is None for episode in episodes):
        saved = read_provenance(directory)
        provenance = replace(saved, remarks=[*read_errors, *saved.remarks])
        return RunFiles(directory, latest_episodes(episodes), provenance)
    overrides, config = read_overrides(directory), _run_config(directory)
    presets, name = preset_names(directory), config.get("name", "a run")
    has_hosts = "environment" not in config or grows_hosts(config)
    run = RunInfo(f"{name}, {presets}" if has_hosts else name, overrides, read_rounds(round_path))
    provenance = Provenance(commands=[f"python -m esper.run {shlex.join(overrides)}"], remarks=read_errors)
    plain_config: Any = OmegaConf.to_container(config, resolve=True)
    host = presets.partition(" on ")[0]  # of episodes that have no host of their own
    held_out = [
        replace(
            episode, host=episode.host or host, config=plain_config, checkpoint=str(directory), variant=run.settings
        )
        for episode in _last_held_out(episodes)
    ]
    return RunFiles(directory, held_out, provenance, run)


def _run_config(directory: Path) -> DictConfig:
    config = read_yaml(directory / ".hydra" / "config.yaml")
    return migrate_config(config) if isinstance(config, DictConfig) else OmegaConf.create()


def read_controller_file(name: str) -> RunFiles:
    """The training run of a controller that was saved as one file."""
    origin = read_origin(find_checkpoint(name))
    run = RunInfo(f"{origin.config.get('name', 'a run')}, {origin.trained_on}", origin.overrides, origin.rounds)
    return RunFiles(Path(name), [], Provenance(commands=[f"python -m esper.run {shlex.join(origin.overrides)}"]), run)


def gather_all(places: Sequence[str]) -> Iterator[RunFiles]:
    """The files of all directories, each once; a job of a sweep without records becomes a remark."""
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
            if len(jobs) > 1 and not any((job / name).is_file() for name in RECORD_FILES):
                yield RunFiles(job, [], Provenance(remarks=[f"{job}: has no records; it is left out."]))
            else:
                yield gather_directory(job.resolve())


def _last_held_out(episodes: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """A training run's held-out episodes of the last round that has any.

    Each run has other held-out episode seeds, so they are numbered instead: a table of several runs has no gaps.
    """
    held_out = [episode for episode in episodes if episode.kind in HELD_OUT]
    last = max((episode.round or 0 for episode in held_out), default=0)
    latest = [episode for episode in held_out if episode.round == last]
    numbers: dict[str | None, dict[int, int]] = {}  # by host, as runs may sample a host for each episode
    for episode in latest:
        own = numbers.setdefault(episode.host, {})
        own.setdefault(episode.episode_seed, len(own))
    return [replace(episode, episode_seed=numbers[episode.host][episode.episode_seed]) for episode in latest]


def list_training_runs(sources: Sequence[RunFiles]) -> list[TrainingRun]:
    """The training runs, each named by the overrides that not all have."""
    runs = [(str(source.directory), source.run) for source in sources if source.run is not None and source.run.rounds]
    names = run_names([(directory, run.overrides) for directory, run in runs])
    return [
        TrainingRun(name, run.task, run.rounds, run.settings, run.run_seed)
        for name, (_, run) in zip(names, runs, strict=True)
    ]


def select_episodes(sources: Sequence[RunFiles]) -> list[EpisodeRecord]:
    """The episodes that arms are compared by: those of evaluations or, without any, those of training runs."""
    evaluations = [source for source in sources if source.run is None and source.episodes]
    if evaluations:
        return [episode for source in evaluations for episode in source.episodes]
    runs = [(source.run.settings, source) for source in sources if source.run is not None]
    distinct = list(dict.fromkeys(settings for settings, _ in runs))
    names = dict(zip(distinct, run_names([(settings, settings.split()) for settings in distinct]), strict=True))
    return [
        replace(episode, arm=f"{names[settings] if len(distinct) > 1 else 'ppo'}, {episode.kind}")
        for settings, source in runs
        for episode in source.episodes
    ]
