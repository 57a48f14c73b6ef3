"""Build the loggers of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from esper.config.build import build
from esper.telemetry.logger_ids import LoggerIds, read_ids
from esper.telemetry.loggers import LoggedRun, adapt, find_adapter


@dataclass(frozen=True)
class RunLoggers:
    """The loggers of a run, by name.

    Arguments:
        loggers: the loggers
        ids: callback that starts them
        access: for each, a command or a path to look at what it logs; empty if there is neither
    """

    loggers: Mapping[str, Logger]
    ids: LoggerIds
    access: Mapping[str, str]

    @property
    def commands(self) -> list[str]:
        """The commands that show what is logged."""
        kinds = {name: find_adapter(type(logger)) for name, logger in self.loggers.items()}
        return [line for name, line in self.access.items() if line and kinds[name].has_command]

    @property
    def access_lines(self) -> list[str]:
        """All commands and paths."""
        return [line for line in self.access.values() if line]

    @rank_zero_only
    def close(self, *, failed: bool) -> None:
        for adapter in adapt(list(self.loggers.values())):
            adapter.close(failed=failed)


def check_loggers(config: DictConfig) -> None:
    """Refuse loggers whose package is not installed."""
    for name, node in logger_nodes(config).items():
        if "_target_" not in node:
            raise ValueError(f"logger.{name}: has no _target_; several loggers are a list, logger=[tensorboard,csv].")
        package = find_adapter(get_object(node._target_)).package
        found = find_spec(package) if package else None
        if package and (found is None or found.origin is None):  # a directory of this name has no origin
            raise ValueError(f"logger={name}: {package} is not installed; pip install 'esper[{package}]' installs it.")


def build_loggers(config: DictConfig, directory: Path, rounds: int, decisions: int) -> RunLoggers:
    """The loggers of a run that has finished this many rounds and decisions."""
    ids = read_ids(directory)
    loggers, access = {}, {}
    for name, node in logger_nodes(config).items():
        target = get_object(node._target_)
        adapter, run = find_adapter(target), LoggedRun(directory, rounds, decisions, ids.get(name))
        given: Any = OmegaConf.to_container(node, resolve=True)
        arguments = adapter.arguments(run, given)
        if "save_dir" in signature(target).parameters:
            arguments["save_dir"] = str(directory)
        loggers[name] = build(node, _partial_=False, **arguments)
        access[name] = adapter.describe_access(run, {**given, **arguments})
    return RunLoggers(loggers, LoggerIds(directory, list(loggers)), access)


def logger_nodes(config: DictConfig) -> dict[str, DictConfig]:
    """The nodes of the loggers that are switched on, by name; `logger=[]` has no key at all."""
    nodes = config.get("logger") or {}
    return {str(name): node for name, node in nodes.items() if node is not None}
