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
    message = str(error) or str(error.__cause__) or type(error).__name__
    if isinstance(error, ConfigCompositionException):
        overrides = [argument for argument in arguments if not argument.startswith("-")]
        if (reason := _refused_override(name, overrides, message)) is not None:
            return reason
    return " ".join(message.split())


def _refused_override(name: str, overrides: list[str], message: str) -> str | None:
    """Why Hydra refuses an override: whether its key exists decides. None if there is another reason."""
    for override in overrides:  # Hydra's message names the override, so all others are tried first
        if f"'{override_key(override)}'" in message or override in message:
            config = _try_compose(name, [other for other in overrides if other != override])
            if config is not None:
                return _refusal(override, config)
    while (found := _find_refused(name, overrides)) is not None:
        index, config = found
        if (reason := _refusal(overrides[index], config)) is not None:
            return reason
        del overrides[index]
    return None


def _find_refused(name: str, overrides: Sequence[str]) -> tuple[int, DictConfig] | None:
    """An override that Hydra refuses, by its index, and the configuration of those before it. None if there is none.

    It is found by bisection, because Hydra takes a third of a second to compose a configuration.
    """
    if _try_compose(name, overrides) is not None:
        return None
    config = compose_config(name)
    accepted, refused = 0, len(overrides)  # the first `accepted` overrides compose, the first `refused` do not
    while refused - accepted > 1:
        middle = (accepted + refused) // 2
        attempt = _try_compose(name, overrides[:middle])
        if attempt is None:
            refused = middle
        else:
            accepted, config = middle, attempt
    return accepted, config


def _try_compose(name: str, overrides: Sequence[str]) -> DictConfig | None:
    try:
        return compose_config(name, overrides)
    except (HydraException, OmegaConfBaseException):
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
