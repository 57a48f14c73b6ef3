"""Adapters of loggers: how each kind shows texts, images, histograms and hyperparameters, and how it is resumed.

Metrics need no adapter: Lightning's loggers all have `log_metrics`.
"""

import csv
import importlib
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from esper.files import write_file

MLFLOW_LENGTH = 250  # characters of a parameter; Lightning cuts off the rest
ChartLayout = dict[str, dict[str, list[object]]]


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is built for.

    Arguments:
        directory: directory of the run
        rounds, decisions: those that are done; 0 for a new run
        run_id: id of the run at the logger's service, if it has one already
    """

    directory: Path
    rounds: int = 0
    decisions: int = 0
    run_id: str | None = None

    @property
    def name(self) -> str:
        return f"{self.directory.parent.name}/{self.directory.name}"


class LoggerAdapter:
    """The adapter of any logger: hyperparameters only. Subclasses add what their kind of logger can do."""

    logger_class: ClassVar[type]
    package: ClassVar[str] = ""  # optional package that it needs; an extra of esper has the same name
    shows_images: ClassVar[bool] = False
    shows_histograms: ClassVar[bool] = False
    has_command: ClassVar[bool] = True  # whether `describe_access` is a command

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    @classmethod
    def arguments(cls, run: LoggedRun, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the logger that depend on the run; `given` are those of the configuration."""
        return {}

    @classmethod
    def describe_access(cls, run: LoggedRun, arguments: Mapping[str, Any]) -> str:
        """Where to look at what is logged: a command or a path; empty if there is neither."""
        return ""

    @property
    def run_id(self) -> str | None:
        """Id of the run at the logger's service; a resumed run needs it."""
        return None

    def start(self) -> None:
        """Called before the first round of a run, new or resumed."""

    def log_settings(
        self, settings: Mapping[str, Any], compared: Mapping[str, Any], metrics: Sequence[str], step: int
    ) -> None:
        """Log the whole configuration; `compared` are those settings, and `metrics` those tags, that runs differ by."""
        self.logger.log_hyperparams(dict(settings))

    def add_layout(self, layout: ChartLayout) -> None:
        """Set pages and charts of metrics."""

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a text in Markdown."""

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        """Add an image, uint8 [height, width, 3]."""

    def add_histogram(self, tag: str, values: Tensor, step: int) -> None:
        """Add a histogram of values."""

    def close(self, *, failed: bool) -> None:
        """Called at the end of a run."""


class TensorBoardAdapter(LoggerAdapter):
    """Has all of it; a resumed run hides the events of rounds that are run again."""

    logger_class = TensorBoardLogger
    shows_images = shows_histograms = True

    @classmethod
    def arguments(cls, run: LoggedRun, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"purge_step": run.decisions + 1} if run.rounds else {}

    @classmethod
    def describe_access(cls, run: LoggedRun, arguments: Mapping[str, Any]) -> str:
        return f"tensorboard --logdir {shlex.quote(str(run.directory))}"

    def log_settings(
        self, settings: Mapping[str, Any], compared: Mapping[str, Any], metrics: Sequence[str], step: int
    ) -> None:
        rows = [f"| {key} | {value} |" for key, value in settings.items()]
        self.add_text("config", "\n".join(["| key | value |", "|---|---|", *rows]), step)
        columns: dict[str, Any] = {
            tag: {} for tag in metrics
        }  # an empty group: a column of the page, but no point in the chart
        self.logger.log_hyperparams(dict(compared), metrics=columns)

    def add_layout(self, layout: ChartLayout) -> None:
        self.logger.experiment.add_custom_scalars(layout)

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.logger.experiment.add_text(tag, text, step)

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self.logger.experiment.add_image(tag, image, step, dataformats="HWC")

    def add_histogram(self, tag: str, values: Tensor, step: int) -> None:
        self.logger.experiment.add_histogram(tag, values, step)


class CSVAdapter(LoggerAdapter):
    """A resumed run writes another directory, because CSVLogger overwrites its file."""

    logger_class = CSVLogger
    has_command = False

    @classmethod
    def arguments(cls, run: LoggedRun, given: Mapping[str, Any]) -> dict[str, Any]:
        version = given.get("version") or ""
        parent = run.directory / (given.get("name") or "")
        written = [parent / version, *parent.glob(f"{version}*from_round_*")]
        for directory in written:
            remove_rows(directory / "metrics.csv", after=run.decisions)
        if run.rounds:
            version = "_".join(part for part in (version, f"from_round_{run.rounds}") if part)
        for name in ("metrics.csv", "hparams.yaml"):  # of a run that was stopped before it saved a round
            remove_file(parent / version / name)
        return {"version": version}

    @classmethod
    def describe_access(cls, run: LoggedRun, arguments: Mapping[str, Any]) -> str:
        return str(run.directory / (arguments.get("name") or "") / arguments["version"] / "metrics.csv")


class WandbAdapter(LoggerAdapter):
    """Continues the run of the same id; without a layout, because Weights & Biases groups charts by tag."""

    logger_class = WandbLogger
    package = "wandb"
    shows_images = shows_histograms = True

    @classmethod
    def arguments(cls, run: LoggedRun, given: Mapping[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {"name": given.get("name") or run.name}
        if given.get("offline"):
            changes["mode"] = "offline"
            silence_wandb()
        return {**changes, "version": run.run_id} if run.run_id else changes

    @classmethod
    def describe_access(cls, run: LoggedRun, arguments: Mapping[str, Any]) -> str:
        directory = shlex.quote(str(run.directory / "wandb"))
        return f"wandb sync {directory}/offline-run-*" if arguments.get("offline") else ""  # else wandb prints its URL

    @property
    def run_id(self) -> str | None:
        version: str | None = self.logger.version
        return version

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.logger.log_text(tag, columns=["text"], data=[[text]], step=step)

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self.logger.log_image(tag, [image], step=step)

    def add_histogram(self, tag: str, values: Tensor, step: int) -> None:
        histogram = importlib.import_module("wandb").Histogram(values.float().cpu().numpy())
        self.logger.log_metrics({tag: histogram}, step=step)

    def close(self, *, failed: bool) -> None:
        importlib.import_module("wandb").finish(exit_code=int(failed))  # else a sweep's next job continues this run


class MLflowAdapter(LoggerAdapter):
    """Continues the run of the same id. Without histograms and a layout: MLflow has neither."""

    logger_class = MLFlowLogger
    package = "mlflow"
    shows_images = True

    @classmethod
    def arguments(cls, run: LoggedRun, given: Mapping[str, Any]) -> dict[str, Any]:
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # it logs each table that it creates
        logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(logging.ERROR)  # warns of every new experiment
        changes: dict[str, Any] = {"run_name": given.get("run_name") or run.name}
        if not given.get("tracking_uri"):
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a local run connects to nothing
            directory = run.directory.absolute()
            changes["tracking_uri"] = f"sqlite:///{directory / 'mlflow.db'}"
            changes["artifact_location"] = given.get("artifact_location") or (directory / "mlflow_artifacts").as_uri()
        return {**changes, "run_id": run.run_id} if run.run_id else changes

    @classmethod
    def describe_access(cls, run: LoggedRun, arguments: Mapping[str, Any]) -> str:
        return f"mlflow ui --backend-store-uri {shlex.quote(str(arguments['tracking_uri']))}"

    @property
    def run_id(self) -> str | None:
        run_id: str | None = self.logger.run_id
        return run_id

    def start(self) -> None:
        self.logger.experiment.update_run(self.run_id, status="RUNNING")

    def log_settings(
        self, settings: Mapping[str, Any], compared: Mapping[str, Any], metrics: Sequence[str], step: int
    ) -> None:
        """Log parameters; those that a resumed run changed become tags, because MLflow's parameters are final."""
        known = self.logger.experiment.get_run(self.run_id).data.params
        self.logger.log_hyperparams({key: value for key, value in settings.items() if key not in known})
        for key, value in settings.items():
            if key in known and known[key] != str(value)[:MLFLOW_LENGTH]:
                self.logger.experiment.set_tag(self.run_id, f"changed.{key}", value)

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.logger.experiment.log_text(self.run_id, text, f"texts/{tag}/{step:08d}.md")

    def add_image(self, tag: str, image: np.ndarray, step: int) -> None:
        self.logger.experiment.log_image(self.run_id, image, key=tag, step=step, synchronous=True)


ADAPTERS: tuple[type[LoggerAdapter], ...] = (TensorBoardAdapter, CSVAdapter, WandbAdapter, MLflowAdapter)


def find_adapter(logger_class: object) -> type[LoggerAdapter]:
    """The adapter of a class of loggers; the base adapter for classes that no other is made for."""
    if isinstance(logger_class, type):
        for adapter in ADAPTERS:
            if issubclass(logger_class, adapter.logger_class):
                return adapter
    return LoggerAdapter


def adapt(loggers: Sequence[Logger]) -> list[LoggerAdapter]:
    """The loggers, each in its adapter."""
    return [find_adapter(type(logger))(logger) for logger in loggers]


@rank_zero_only
def silence_wandb() -> None:
    """Make wandb print nothing, and send no error reports; it reads these variables once, in `setup`."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    importlib.import_module("wandb").setup()


@rank_zero_only
def remove_rows(path: Path, *, after: int) -> None:
    """Remove rows after a step from a CSV file, and one that was not completed."""
    if not path.exists():
        return
    with path.open(newline="") as file:
        header, *rows = list(csv.reader(file)) or [["step"]]
    column = header.index("step")
    kept = [row for row in rows if len(row) == len(header) and int(row[column]) <= after]
    if len(kept) < len(rows):
        text = StringIO(newline="")
        csv.writer(text).writerows([header, *kept])
        write_file(path, text.getvalue())


@rank_zero_only
def remove_file(path: Path) -> None:
    path.unlink(missing_ok=True)
