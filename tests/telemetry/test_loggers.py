import csv
import io
import json
import sqlite3
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.config import compose_config
from esper.config import loggers as building
from esper.config.loggers import build_loggers, check_loggers
from esper.telemetry import dashboard
from esper.telemetry import loggers as adapters
from esper.telemetry.logger_ids import LOGGER_IDS
from esper.telemetry.loggers import (
    CSVAdapter,
    LoggedRun,
    LoggerAdapter,
    MLflowAdapter,
    TensorBoardAdapter,
    WandbAdapter,
    find_adapter,
    remove_rows,
)
from esper.training import train
from tests.telemetry.fixtures_runs import TINY

SMALLEST = (*TINY, "environment.envs=1", "environment.steps=2", "ppo.epochs=1", "ppo.minibatches=1", "rounds=1")
HERE = "tests.telemetry.test_loggers"
DECISIONS = 2  # of a round


class ListLogger(Logger):
    """A user's logger: it has only what Lightning requires."""

    made: list["ListLogger"] = []  # noqa: RUF012 (a record of the test)

    def __init__(self, version: str = "first") -> None:
        super().__init__()
        self.metrics: list[dict[str, float]] = []
        self.settings: dict[str, Any] = {}
        self._version = version
        self.made.append(self)

    name = "list"

    @property
    def version(self) -> str:
        return self._version

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.metrics.append({**metrics, "step": step})

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.settings.update(params)


class ServiceAdapter(LoggerAdapter):
    """Of a service that gives each run an id."""

    logger_class = ListLogger

    @classmethod
    def arguments(cls, run: LoggedRun, given: Any) -> dict[str, Any]:
        return {"version": f"{run.run_id} again"} if run.run_id else {}

    @property
    def run_id(self) -> str:
        return str(self.logger.version)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ListLogger]:
    """The list loggers that the test has made."""
    monkeypatch.setattr(ListLogger, "made", [])
    return ListLogger.made


def train_smallest(directory: Path, *overrides: str, resume: bool = False) -> str:
    """Train one round, or continue; returns what was printed."""
    (directory / ".hydra").mkdir(exist_ok=True)
    printed = io.StringIO()
    console = Console(width=300, file=printed)
    train(compose_config("run", [*SMALLEST, *overrides]), directory, console, [] if resume else None)
    return printed.getvalue()


def read_csv(path: Path, tag: str = "episode/score") -> list[int]:
    """The steps at which a CSV file has a metric."""
    with path.open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row[tag]]


def event_steps(directory: Path, tag: str = "episode/score") -> list[int]:
    return [event.step for event in EventAccumulator(str(directory)).Reload().Scalars(tag)]


@pytest.mark.parametrize(
    ("logger_class", "adapter"),
    [
        (TensorBoardLogger, TensorBoardAdapter), (CSVLogger, CSVAdapter), (WandbLogger, WandbAdapter),
        (MLFlowLogger, MLflowAdapter), (type("Mine", (CSVLogger,), {}), CSVAdapter), (ListLogger, LoggerAdapter),
        (build_loggers, LoggerAdapter),
    ],
)  # fmt: skip
def test_a_logger_has_the_adapter_of_its_class_or_the_base_adapter(logger_class: Any, adapter: type) -> None:
    assert find_adapter(logger_class) is adapter


def test_many_loggers_get_all_rounds_once_in_a_resumed_run_too(tmp_path: Path) -> None:
    printed = train_smallest(tmp_path, "logger=many", "rounds=2")
    assert f"to watch    tensorboard --logdir {tmp_path}\n" in printed
    assert f"to watch    {tmp_path}/csv/metrics.csv\n" in printed
    assert f"next:\n  tensorboard --logdir {tmp_path}\n  python" in printed
    assert read_csv(tmp_path / "csv/metrics.csv") == event_steps(tmp_path) == [2, 4]
    assert "environment.steps: 2" in (tmp_path / "csv/hparams.yaml").read_text()
    train_smallest(tmp_path, "logger=many", "rounds=3", resume=True)
    assert event_steps(tmp_path) == [2, 4, 6]
    assert read_csv(tmp_path / "csv/metrics.csv") == [2, 4]
    assert read_csv(tmp_path / "csv_from_round_2/metrics.csv") == [6]


def test_any_loggers_are_chosen_by_a_list_and_switched_off_by_null() -> None:
    nodes = building.logger_nodes(compose_config("run", ["logger=[csv,wandb,mlflow]", "logger.csv=null"]))
    assert list(nodes) == ["wandb", "mlflow"]
    assert nodes["wandb"].offline is True
    assert building.logger_nodes(compose_config("run", ["logger=[]"])) == {}


def test_images_are_drawn_once_for_all_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = dashboard.as_array
    monkeypatch.setattr(dashboard, "as_array", lambda figure: drawn.append(figure) or original(figure))
    second = "{_target_: lightning.pytorch.loggers.TensorBoardLogger, _partial_: true, name: '', version: second}"
    train_smallest(tmp_path, f"+logger.second={second}")
    assert len(drawn) == 4
    for directory in (tmp_path, tmp_path / "second"):
        events = EventAccumulator(str(directory)).Reload()
        assert len(events.Tags()["images"]) == 4
        assert "config/text_summary" in events.Tags()["tensors"]


def test_a_logger_of_the_user_gets_metrics_and_settings(tmp_path: Path, made: list[ListLogger]) -> None:
    printed = train_smallest(tmp_path, "logger=none", f"+logger.mine={{_target_: {HERE}.ListLogger}}")
    assert any("episode/score" in metrics and metrics["step"] == DECISIONS for metrics in made[0].metrics)
    assert made[0].settings["environment.steps"] == 2
    assert "to watch" not in printed
    assert "tensorboard" not in printed
    assert not (tmp_path / LOGGER_IDS).exists()


def test_a_resumed_run_continues_under_the_id_that_a_service_gave_it(
    tmp_path: Path, made: list[ListLogger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "ADAPTERS", (*adapters.ADAPTERS, ServiceAdapter))
    mine = ("logger=none", f"+logger.mine={{_target_: {HERE}.ListLogger}}", "callbacks.dashboard=null")
    train_smallest(tmp_path, *mine)
    assert json.loads((tmp_path / LOGGER_IDS).read_text()) == {"mine": "first"}
    train_smallest(tmp_path, *mine, "rounds=2", resume=True)
    assert [logger.version for logger in made] == ["first", "first again"]


@pytest.mark.parametrize("found", [None, ModuleSpec("wandb", None)], ids=["nothing", "a directory of that name"])
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_whose_package_is_not_installed_is_refused_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch, name: str, found: ModuleSpec | None
) -> None:
    monkeypatch.setattr(building, "find_spec", lambda package: found)
    with pytest.raises(ValueError, match=rf"^logger={name}: .* pip install 'esper\[{name}\]' installs it\.$"):
        check_loggers(compose_config("run", [f"logger={name}"]))


def test_a_part_of_the_configuration_that_is_no_logger_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^logger.more: has no _target_; .*logger=\[tensorboard,csv\]\.$"):
        check_loggers(compose_config("run", ["+logger@logger.more=csv"]))


def test_rows_of_rounds_that_run_again_are_removed_from_csv_files(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("a,step\r\n1,2\r\n1,4\r\n1,6\r\n1")
    remove_rows(path, after=4)
    assert path.read_text().split() == ["a,step", "1,2", "1,4"]
    path.write_text("")
    remove_rows(path, after=4)
    remove_rows(tmp_path / "absent.csv", after=4)


def test_a_run_that_is_resumed_twice_from_the_same_round_has_its_rows_once(tmp_path: Path) -> None:
    for version in ("csv", "csv_from_round_1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "metrics.csv").write_text("a,step\n1,2\n1,4\n")
    arguments = CSVAdapter.arguments(LoggedRun(tmp_path, 1, 2), {"name": "", "version": "csv"})
    assert arguments == {"version": "csv_from_round_1"}
    assert (tmp_path / "csv/metrics.csv").read_text().split() == ["a,step", "1,2"]
    assert not (tmp_path / "csv_from_round_1/metrics.csv").exists()


def test_wandb_is_offline_and_mlflow_in_a_database_of_the_run_unless_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_LOGGING_LEVEL", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "unchanged")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///of_an_earlier_job.db")
    silenced = []
    monkeypatch.setattr(adapters, "silence_wandb", lambda: silenced.append(True))
    config, run = compose_config("run", ["logger=[wandb,mlflow]"]), LoggedRun(tmp_path, 1, 2, "id")
    offline = WandbAdapter.arguments(run, config.logger.wandb)
    assert offline == {"name": run.name, "mode": "offline", "version": "id"}
    assert WandbAdapter.describe_access(run, {"offline": True}) == f"wandb sync {tmp_path}/wandb/offline-run-*"
    assert WandbAdapter.arguments(run, {"name": "mine"}) == {"name": "mine", "version": "id"}
    assert WandbAdapter.describe_access(run, {}) == ""
    assert silenced == [True]
    local = MLflowAdapter.arguments(run, config.logger.mlflow)
    assert local == {
        "run_name": run.name, "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db",
        "artifact_location": f"file://{tmp_path}/mlflow_artifacts", "run_id": "id",
    }  # fmt: skip
    assert MLflowAdapter.describe_access(run, local) == f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db"
    served = MLflowAdapter.arguments(LoggedRun(tmp_path), {"tracking_uri": "http://server:5000"})
    assert served == {"run_name": run.name}


def test_settings_that_a_resumed_run_changed_are_tags_in_mlflow() -> None:
    logged: dict[str, Any] = {}
    client = SimpleNamespace(
        get_run=lambda run_id: SimpleNamespace(data=SimpleNamespace(params={"rounds": "10", "long": "x" * 250})),
        set_tag=lambda run_id, key, value: logged.update({key: value}),
    )
    logger = SimpleNamespace(run_id="id", experiment=client, log_hyperparams=logged.update)
    MLflowAdapter(logger).log_settings({"rounds": 100, "long": "x" * 300, "new": 1}, {}, (), 0)
    assert logged == {"new": 1, "changed.rounds": 100}


@pytest.mark.skipif(find_spec("wandb") is None, reason="needs pip install 'esper[wandb]'")
@pytest.mark.filterwarnings("ignore")
def test_wandb_has_metrics_images_and_texts_of_a_run_and_its_resumed_run_under_one_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_smallest(tmp_path, "logger=wandb", "callbacks.anomalies.thresholds.ratio_high=0.5")
    train_smallest(tmp_path, "logger=wandb", "rounds=2", resume=True)
    first, second = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert first.name.split("-")[-1] == second.name.split("-")[-1]
    for directory in (first, second):
        (log,) = directory.glob("*.wandb")
        for word in (b"episode/score", b"learning/advantages", b"environment.steps"):
            assert word in log.read_bytes()
        assert len(list(directory.glob("files/media/images/pictures/*.png"))) == 4
    assert list(first.glob("files/media/table/anomaly/ratio_explosion*"))
    assert "wandb" not in capfd.readouterr().err


@pytest.mark.skipif(find_spec("mlflow") is None, reason="needs pip install 'esper[mlflow]'")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_metrics_images_and_texts_of_a_run_and_its_resumed_run_in_one_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train_smallest(tmp_path, "logger=mlflow", "callbacks.anomalies.thresholds.ratio_high=0.5")
    train_smallest(tmp_path, "logger=mlflow", "rounds=2", resume=True)
    database = sqlite3.connect(tmp_path / "mlflow.db")
    assert database.execute("select status from runs").fetchall() == [("FINISHED",)]
    steps = database.execute("select step from metrics where key = 'episode/score' order by step").fetchall()
    assert steps == [(2,), (4,)]
    assert database.execute("select value from params where key = 'rounds'").fetchall() == [("1",)]
    assert database.execute("select value from tags where key = 'changed.rounds'").fetchall() == [("2",)]
    database.close()
    assert len(list(tmp_path.glob("mlflow_artifacts/*/artifacts/images/*.png"))) == 8
    assert list(tmp_path.glob("mlflow_artifacts/*/artifacts/texts/anomaly/ratio_explosion/*.md"))
    assert "mlflow" not in capfd.readouterr().err.lower()
