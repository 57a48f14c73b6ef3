"""Errors of Hydra and OmegaConf as one sentence each."""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from esper.command_line import override_key
from esper.config.compose import compose_config, group_names
from esper.config.output import OutputDirectory
from esper.config.suggest import suggest
from esper.files import describe_os_error

MISSING = object()


def describe_error(error: Exception, name: str, arguments: Sequence[str]) -> str:
    """One sentence for an error that was raised for these arguments; `name` is that of the configuration."""
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        hint = "; pip install 'esper[sweep]' adds more" if group.startswith("hydra/") else ""
        return f"{group}={option}: there is no such option; there are {', '.join(error.options)}{hint}."
    if isinstance(error, ConfigCompositionException) and (reason := _refused_override(name, arguments)) is not None:
        return reason
    return " ".join((str(error) or str(error.__cause__) or type(error).__name__).split())


def _refused_override(name: str, arguments: Sequence[str]) -> str | None:
    """Why Hydra refuses the first override that it refuses: whether its key exists decides. None if another reason."""
    accepted: list[str] = []
    flags = [argument for argument in arguments if argument.startswith("-")]
    for override in (argument for argument in arguments if argument not in flags):
        try:
            compose_config(name, [*accepted, override])
            accepted.append(override)
        except (HydraException, OmegaConfBaseException):
            if (reason := _refusal(override, compose_config(name, accepted))) is not None:
                return reason
    return None


def _refusal(override: str, config: DictConfig) -> str | None:
    """Why an override does not fit a configuration; None if its key fits."""
    key = override_key(override)
    if key.startswith("hydra") or "@" in key:
        return None
    exists = OmegaConf.select(config, key, default=MISSING) is not MISSING
    if override.startswith("+"):
        return f"{key}: exists already; set it without +." if exists and not override.startswith("++") else None
    if exists:
        return None
    if key in group_names():
        return f"{key}: is not in the defaults list; add it with +{key}=OPTION."
    return f"{key}: there is no such key; {suggest(key, _known_keys(config, key))}."


def _known_keys(config: DictConfig, key: str) -> list[str]:
    """The keys next to a wrong one; those at the top, and the groups, if its parent does not exist."""
    parent = key.rpartition(".")[0]
    node = OmegaConf.select(config, parent) if parent else None
    if isinstance(node, DictConfig):
        return [f"{parent}.{child}" for child in map(str, node)]
    return [*map(str, config), *group_names()]


def describe_output_error(error: OSError) -> str:
    """One sentence for a file of a run that cannot be written; a new directory without results is removed."""
    directory = OutputDirectory.current
    if directory is not None and OutputDirectory.is_new:
        remove_empty_run(directory)
    return describe_os_error(error, directory)


def remove_empty_run(directory: Path) -> None:
    """Remove the directory of a run that did not begin, if it has only Hydra's files."""
    logs = list(directory.glob("*.log"))
    if directory.is_dir() and set(directory.iterdir()) <= {directory / ".hydra", *logs}:
        shutil.rmtree(directory / ".hydra", ignore_errors=True)
        for log in logs:
            log.unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()
