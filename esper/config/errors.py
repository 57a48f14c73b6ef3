"""A Hydra application whose errors are one sentence each."""

import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from esper.config.compose import compose_config, group_names
from esper.config.output import OutputDirectory
from esper.config.suggest import suggest
from esper.files import describe_os_error


def run_app(main: Callable[[], None], name: str) -> None:
    """Run a Hydra application; exit with one sentence if its command line is wrong.

    `name` is that of the application's configuration.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its errors instead of printing them
    warnings.filterwarnings("ignore", "(?s).*is validated against ConfigStore schema")  # our launchers
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(_describe_error(error, name))
    except (OSError, ValueError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__  # logging wraps that of its file
        if not isinstance(cause, OSError):
            raise
        directory = OutputDirectory.current
        if directory is not None and OutputDirectory.is_new and directory.is_dir():
            remove_empty_run(directory)
        sys.exit(describe_os_error(cause, directory))
    except KeyboardInterrupt:
        sys.exit(130)  # the exit code that shells use


def _describe_error(error: Exception, name: str) -> str:
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        hint = "; pip install 'esper[sweep]' adds more" if group.startswith("hydra/") else ""
        return f"{group}={option}: there is no such option; there are {', '.join(error.options)}{hint}."
    lines = [line.strip() for line in (str(error) or str(error.__cause__)).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    refused = re.match(r"Could not (?:override|append to config|delete from config).*'([^']+)'", message)
    if not isinstance(error, ConfigCompositionException) or refused is None:
        return " ".join(lines) or message
    key = str(refused[1])
    if "already at" in message:
        return f"{key}: exists already; set it without +."
    if "No match in the defaults list" in message and key in group_names():
        return f"{key}: is not in the defaults list; add it with +{key}=OPTION."
    return f"{key}: there is no such key; {suggest(key, _known_keys(compose_config(name), key))}."


def _known_keys(config: DictConfig, key: str) -> list[str]:
    """The keys next to a wrong one; those at the top, and the groups, if its parent does not exist."""
    parent = key.rpartition(".")[0]
    node = OmegaConf.select(config, parent) if parent else None
    if isinstance(node, DictConfig):
        return [f"{parent}.{child}" for child in map(str, node)]
    return [*map(str, config), *group_names()]


def remove_empty_run(directory: Path) -> None:
    """Remove the directory of a run that did not begin, if it has only Hydra's files."""
    logs = list(directory.glob("*.log"))
    if set(directory.iterdir()) <= {directory / ".hydra", *logs}:
        shutil.rmtree(directory / ".hydra", ignore_errors=True)
        for log in logs:
            log.unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()
