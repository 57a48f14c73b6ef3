"""Configurations and overrides of version 0.1, under today's names."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from esper.config.overrides import override_key
from esper.renames import TARGETS, renamed_key, renamed_override


def migrate_config(config: DictConfig) -> DictConfig:
    """The same configuration with renamed keys and targets; interpolations stay as they are written."""
    plain = OmegaConf.to_container(config, resolve=False)
    migrated: DictConfig = OmegaConf.create(_migrated(plain, ""))
    return migrated


def _migrated(node: Any, path: str) -> Any:
    if isinstance(node, list):
        return [_migrated(entry, path) for entry in node]
    if not isinstance(node, dict):
        return node
    found = {}
    for key, value in node.items():
        full = f"{path}.{key}" if path else str(key)
        name = (renamed_key(full) or full).rpartition(".")[2]
        if key == "_target_":
            found[key] = TARGETS.get(value, value)
        elif name == key or name not in node:
            found[name] = _migrated(value, full)
    return found


def check_renamed(arguments: Sequence[str]) -> None:
    """Refuse a key or option that is typed by an old name, in a sentence that has the new one."""
    for argument in arguments:
        new = renamed_override(argument)
        if new == argument:
            continue
        old_key, key = override_key(argument), override_key(new)
        if old_key != key:
            raise ValueError(f"{old_key}: is now {key}.")
        raise ValueError(f"{argument}: is now {new}.")
