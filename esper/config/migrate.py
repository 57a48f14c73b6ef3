"""Conversion of configurations of version 0.1, and refusal of its names on the command line."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from esper.config.overrides import override_key
from esper.renames import TARGETS, renamed_key, renamed_override


def migrate_config(config: DictConfig) -> DictConfig:
    """A configuration with keys and targets renamed; interpolations are not resolved."""
    migrated: DictConfig = OmegaConf.create(_migrate(OmegaConf.to_container(config, resolve=False), ""))
    return migrated


def _migrate(node: Any, path: str) -> Any:
    if isinstance(node, list):
        return [_migrate(entry, path) for entry in node]
    if not isinstance(node, dict):
        return node
    migrated = {}
    for key, value in node.items():
        full_key = f"{path}.{key}" if path else str(key)
        new = (renamed_key(full_key) or full_key).rpartition(".")[2]
        if key == "_target_":
            migrated[key] = TARGETS.get(value, value)
        elif new == key or new not in node:
            migrated[new] = _migrate(value, full_key)
    return migrated


def check_renamed(arguments: Sequence[str]) -> None:
    """Refuse keys and options of version 0.1 on the command line; the message has the new name."""
    for argument in arguments:
        new = renamed_override(argument)
        if new == argument:
            continue
        old_key, key = override_key(argument), override_key(new)
        if old_key != key:
            raise ValueError(f"{old_key}: is now {key}.")
        raise ValueError(f"{argument}: is now {new}.")
