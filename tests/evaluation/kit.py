"""A small evaluation, a trained controller for it, and episodes that were never played."""

from pathlib import Path
from typing import Any

from rich.console import Console

from esper.config import compose_config
from esper.evaluate import evaluate
from esper.resume import save
from esper.run import train
from tests.environment_kit import SMALL

TASK = (*SMALL, "host=cifar_blind", "environment.steps=8", "environment.envs=3")
TRAINED = (*TASK, "policy.hidden=16", "ppo.epochs=1", "collector.warmup=1", "validate_every=0", "rounds=2", "name=tiny")


def trained(directory: Path, *overrides: str) -> Path:
    """The directory of a run of two rounds, as the command line would leave it."""
    everything = [*TRAINED, *overrides]
    config = compose_config("run", everything)
    (directory / ".hydra").mkdir(parents=True)
    save(config, directory, everything)
    train(config, directory, Console(quiet=True))
    return directory


def evaluated(directory: Path, *overrides: str) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    return evaluate(compose_config("evaluate", [*TASK, *overrides]), directory, Console(quiet=True), "a command")


def line(arm: str = "none", seed: int = 1, score: float | None = 10.0, **changes: Any) -> dict[str, Any]:
    """A record of two steps."""
    step = {
        "action": {"op": "WAIT"}, "legal": ["WAIT"], "score": score, "stage": ["DORMANT"], "alpha": [0.0],
        "blueprint": [None], "entered": [[]], "parameters": 100.0, "contribution": [None], "rollback": None,
    }  # fmt: skip
    return {
        "version": 2, "origin": "", "rule": "",
        "host": "a_host", "config": {"host": {"blocks": 1}, "data": {"resolution": 8}}, "controller": arm,
        "learner": None, "seed": seed, "data": "synthetic", "slots": ["block1"], "fossils": {}, "host_parameters": 100,
        "parameters": 100.0, "parameters_peak": 100.0, "parameters_mean": 100.0, "flops": 2e9, "seconds": 1.0,
        "spent": {"training": 1e9, "isolated": 0.0, "validation": 1e9, "probes": 0.0, "controller": 0},
        "score": score, "test_score": score, "selection_score": score, "steps": [step, step], **changes,
    }  # fmt: skip
