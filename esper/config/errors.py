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

from esper.config.compose import CONF, compose_config
from esper.config.suggest import suggest


def run_app(main: Callable[[], None], name: str) -> None:
    """Run a Hydra application; what it cannot understand of the command line is said in one sentence."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # lets its errors come here
    warnings.filterwarnings("ignore", "(?s).*is validated against ConfigStore schema")  # our launchers
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        sys.exit(_sentence(error, name))
    except PermissionError as error:
        sys.exit(f"{error.filename}: {error.strerror}.")
    except KeyboardInterrupt:
        sys.exit(130)  # as shells have it


def _sentence(error: Exception, name: str) -> str:
    if isinstance(error, MissingConfigException) and error.options and error.missing_cfg_file:
        group, _, option = error.missing_cfg_file.rpartition("/")
        more = "; pip install 'esper[sweep]' brings more" if group.startswith("hydra/") else ""
        return f"{group}={option}: there is no such option; there are {', '.join(error.options)}{more}."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    wrong = re.match(r"Could not (?:override|append to config|delete from config).*'([^']+)'", lines[0])
    if isinstance(error, ConfigCompositionException) and wrong:
        config = compose_config(name)
        keys = [str(key) for key in config] + [path.name for path in CONF.iterdir() if path.is_dir()]
        key = str(wrong[1])
        parent, _, _ = key.rpartition(".")
        found = OmegaConf.select(config, parent) if parent else None
        if isinstance(found, DictConfig):
            keys = [f"{parent}.{name}" for name in map(str, found)]
        return f"{key}: there is no such key; {suggest(key, keys)}."
    return " ".join(lines)


def remove_empty_run(directory: Path) -> None:
    """What Hydra has written for a run that did not begin; whatever else is there stays."""
    logs = list(directory.glob("*.log"))
    if set(directory.iterdir()) <= {directory / ".hydra", *logs}:
        shutil.rmtree(directory / ".hydra", ignore_errors=True)
        for log in logs:
            log.unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()
