"""A small evaluation, a trained controller for it, and hand-made episode records."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from esper.checkpoints.resume import save_config
from esper.config import compose_config
from esper.evaluation.run import evaluate
from esper.records import EpisodeRecord, StepEntry, read_episodes
from esper.training import train
from tests.fixtures_environment import SMALL

TASK = (
    *SMALL, "host=cifar_blind", "environment.steps=8", "environment.envs=3", "environment.batches=1",
    "data.validation=20", "environment.validation_batch=20",
)  # fmt: skip
TRAINED = (*TASK, "policy.hidden=16", "ppo.epochs=1", "collector.warmup=1", "validate_every=0", "rounds=2", "name=tiny")


def trained(directory: Path, *overrides: str) -> Path:
    """Train for two rounds; returns the run's directory, as the command leaves it."""
    all_overrides = [*TRAINED, *overrides]
    config = compose_config("run", all_overrides)
    (directory / ".hydra").mkdir(parents=True)
    save_config(config, directory, all_overrides)
    train(config, directory, Console(quiet=True))
    return directory


def evaluated(directory: Path, *overrides: str) -> dict[str, Any]:
    """Run an evaluation; returns each task's results by arm."""
    directory.mkdir(parents=True, exist_ok=True)
    return evaluate(compose_config("evaluate", [*TASK, *overrides]), directory, Console(quiet=True), "a command")


def make_episode(arm: str = "none", episode_seed: int = 1, score: float | None = 10.0, **changes: Any) -> EpisodeRecord:
    """A record of two steps."""
    step = StepEntry(
        action={"op": "WAIT"}, legal=["WAIT"], score=score, stage=["DORMANT"], alpha=[0.0], blueprint=[None],
        entered=[[]], parameters=100.0, contribution=[None],
    )  # fmt: skip
    values: dict[str, Any] = {
        "host": "a_host", "config": {"host": {"blocks": 1}, "data": {"resolution": 8}}, "data": "synthetic",
        "slots": ["block1"], "fossils": {}, "host_parameters": 100, "parameters": 100.0, "parameters_peak": 100.0,
        "parameters_mean": 100.0, "flops": 2e9, "seconds": 1.0, "split": "test", "test_score": score,
        "flops_by_part": {"training": 1e9, "isolated": 0.0, "validation": 1e9, "probes": 0.0, "controller": 0},
        "selection_score": score, "steps": [step, step],
    }  # fmt: skip
    return EpisodeRecord(arm=arm, episode_seed=episode_seed, score=score, **{**values, **changes})


def make_episodes(arm: str, scores: Sequence[float], **changes: Any) -> list[EpisodeRecord]:
    """One record for each score, on episode seeds 0, 1, ..."""
    return [make_episode(arm, episode_seed, score, **changes) for episode_seed, score in enumerate(scores)]


def write_episodes(path: Path, episodes: Sequence[EpisodeRecord]) -> None:
    path.write_text("".join(json.dumps(episode.to_dict()) + "\n" for episode in episodes))


def load_episodes(path: Path) -> list[EpisodeRecord]:
    """The episodes of a file that can be read completely."""
    episodes, errors = read_episodes(path)
    assert errors == []
    return episodes
