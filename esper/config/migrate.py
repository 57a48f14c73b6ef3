"""Conversion of configurations of version 0.1, and refusal of its names on the command line."""

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from esper.config.overrides import override_key
from esper.renames import rename_config, renamed_override


def migrate_config(config: DictConfig) -> DictConfig:
    """A configuration with keys and targets renamed; interpolations are not resolved."""
    migrated: DictConfig = OmegaConf.create(rename_config(OmegaConf.to_container(config, resolve=False)))
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
