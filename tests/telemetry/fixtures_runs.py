"""A tiny training run with growing hosts, in this process."""

from pathlib import Path

from rich.console import Console

from esper.config import compose_config
from esper.training import train
from tests.fixtures_environment import SMALL

TINY = (
    *SMALL, "host=cifar_blind", "environment.steps=4", "environment.envs=3", "policy.hidden=16", "ppo.epochs=2",
    "collector.warmup=1", "validate_every=0", "name=tiny", "rounds=2",
)  # fmt: skip


def train_tiny(directory: Path, *overrides: str) -> dict[str, float]:
    return train(compose_config("run", [*TINY, *overrides]), directory, Console(quiet=True))
