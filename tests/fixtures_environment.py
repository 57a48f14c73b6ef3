"""A small environment, built from conf/ with overrides."""

from functools import cache
from typing import Any

from omegaconf import DictConfig

from esper.config import build_environment, check_config, compose_config
from esper.environment import Environment

SMALL = (
    "data=synthetic_images", "data.resolution=8", "data.train=400", "data.validation=100", "data.test=100",
    "environment.envs=2", "environment.steps=10", "environment.batch=16", "environment.batches=2",
    "environment.validation_batch=50", "environment.workers=0", "environment.threads=1", "lifecycle.prune_age=1",
    "lifecycle.cooldown=1",
)  # fmt: skip
SMALL_TEXT = (
    "host=tinystories_small", "host.channels=16", "host.heads=2", "data=synthetic_stories", "data.block_size=16",
    "data.vocabulary=257", "data.train_bytes=20000", "data.validation_bytes=2000", "data.test_bytes=2000",
    "optimizer=adamw",
)  # fmt: skip


@cache
def config(*overrides: str) -> DictConfig:
    """The configuration of esper.evaluate for a small environment on synthetic images."""
    return compose_config("evaluate", [*SMALL, *overrides])


def text_config(*overrides: str) -> DictConfig:
    """The same on synthetic stories."""
    images = [override for override in SMALL if not override.startswith("data")]
    return compose_config("evaluate", [*images, *SMALL_TEXT, *overrides])


def environment(*overrides: str, **changes: Any) -> Environment:
    composed = config(*overrides)
    check_config(composed)
    return build_environment(composed, **changes)
