"""Conversion of configurations of version 0.1."""

from omegaconf import DictConfig, OmegaConf

from esper.renames import rename_config


def migrate_config(config: DictConfig) -> DictConfig:
    """A configuration with keys and targets renamed; interpolations are not resolved."""
    migrated: DictConfig = OmegaConf.create(rename_config(OmegaConf.to_container(config, resolve=False)))
    return migrated
