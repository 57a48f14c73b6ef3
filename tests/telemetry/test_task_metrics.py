"""What a controller gains on the tasks of a distribution."""

import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from esper.config import compose_config
from esper.config.build import task_specs
from esper.environment import HostTask, KnownScores
from esper.ppo import LAST, read_checkpoint
from esper.records import EpisodeRecord, StepEntry, read_lines
from esper.tasks import FixedPlan, KnownTask, PlanScore, TaskList, task_digest
from esper.telemetry.progress import round_line
from esper.telemetry.task_metrics import task_metrics
from esper.training import train
from tests.fixtures_environment import SMALL

ZOO = (
    *(override for override in SMALL if "batches" not in override),
    "+experiment=zoo_ppo", "environment.steps=2", "environment.envs=4", "policy.hidden=16", "ppo.epochs=1",
    "collector.warmup=1", "ppo.critic_epochs=1", "validate_every=1", "rounds=1", "start=null",
    "tasks.repeats=2", "tasks.counts.train=4", "tasks.counts.validation=2", "tasks.host.pools=1", "data.train=400",
    "tasks.settings.budget_batches=20", "tasks.settings.batch=8", "tasks.variants=[]", "tasks.host.blocks=2",
)  # fmt: skip


def make_task(family: str, known: KnownScores | None = None) -> HostTask:
    return HostTask(build=None, data=None, family=family, known=known)  # type: ignore[arg-type]


def make_episode(host: str, score: float | None, *, grew: bool = False) -> EpisodeRecord:
    step = StepEntry(
        action={"op": "WAIT"}, score=score, stage=[], alpha=[], blueprint=[], entered=[], contribution=[]
    )  # fmt: skip
    known: dict[str, Any] = {
        "arm": "ppo", "episode_seed": 1, "data": "synthetic", "slots": ["a"], "host_parameters": 80,
        "fossils": {"a": ("norm", "ADD")} if grew else {}, "parameters": 80.0, "parameters_peak": 80.0,
        "parameters_mean": 80.0, "flops": 1e9, "score": score, "steps": [step],
    }  # fmt: skip
    return EpisodeRecord(**known, host=host)


TASKS = {
    "narrow1": make_task("narrow", KnownScores(40.0, 46.0)),
    "narrow2": make_task("narrow", KnownScores(30.0)),
    "narrow3": make_task("narrow"),
    "complete1": make_task("complete"),
}


def test_gain_regret_and_growth_are_means_over_tasks_and_families() -> None:
    episodes = [
        make_episode("narrow1", 42.0, grew=True), make_episode("narrow1", 44.0),
        make_episode("narrow2", 29.0, grew=True), make_episode("narrow2", None, grew=True),
        make_episode("complete1", 70.0), make_episode("complete1", 72.0),
    ]  # fmt: skip
    metrics = task_metrics(episodes, TASKS)
    assert metrics["tasks/gain"] == metrics["tasks/gain_narrow"] == (3 - 1) / 2, "complete1 is not known"
    assert metrics["tasks/regret"] == 46 - 43, "only narrow1 has a known plan"
    assert metrics["tasks/grew"] == (0.5 + 1 + 0) / 3
    assert (metrics["tasks/grew_narrow"], metrics["tasks/grew_complete"]) == (0.75, 0)
    assert "tasks/gain_complete" not in metrics, "no task of this family is known"


def test_what_a_round_does_not_measure_is_not_zero() -> None:
    metrics = task_metrics([make_episode("complete1", 70.0, grew=True)], TASKS)
    assert metrics["tasks/grew"] == 1
    for name in ("gain", "gain_narrow", "regret", "grew_narrow"):
        assert math.isnan(metrics[f"tasks/{name}"])


def test_hosts_without_a_task_distribution_have_no_metrics_of_tasks() -> None:
    hosts = {"blind": make_task(""), "wide": make_task("")}
    assert task_metrics([make_episode("blind", 40.0)], hosts) == {}


def test_the_line_of_a_round_has_the_gain_if_it_was_measured() -> None:
    metrics = {"episode/score": 40.0, "episode/return": 1.0, "losses/explained_variance": 0.5}
    assert "gain +1.25  return" in round_line(1, 9, 40.0, {**metrics, "tasks/gain": 1.25})
    assert "gain" not in round_line(1, 9, 40.0, {**metrics, "tasks/gain": math.nan})
    assert "gain" not in round_line(1, 9, 40.0, metrics)


def test_a_run_reports_gains_of_training_and_validation_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config("run", ZOO)
    plans = (PlanScore(FixedPlan((("all", "norm"),)), 55.0, 2),)
    known = [
        KnownTask(spec.name, spec.family, spec.split, task_digest(spec), (10.0, 30.0), plans)
        for spec in task_specs(config)
        if spec.split == "train"
    ]
    monkeypatch.setattr(TaskList, "load", lambda name: TaskList(name, known, {}))
    train(config, tmp_path, Console(quiet=True))
    critic = read_checkpoint(tmp_path / "checkpoints" / LAST).metadata.critic
    assert critic is not None
    assert "best_gain" in critic["task_features"]
    (line,) = read_lines(tmp_path / "rounds.jsonl")
    assert line["tasks/gain"] == pytest.approx(line["episode/validation_score"] - 20)
    assert line["tasks/regret"] == pytest.approx(55 - line["episode/validation_score"])
    families = [tag.removeprefix("tasks/grew_") for tag in line if tag.startswith("tasks/grew_")]
    measured = [line[f"tasks/gain_{family}"] for family in families if line.get(f"tasks/gain_{family}") is not None]
    assert len(measured) == 2, "a round has two tasks"
    assert sum(measured) / 2 == pytest.approx(line["tasks/gain"])
    for kind in ("sampled", "greedy"):
        assert 0 <= line[f"validation/{kind}_grew"] <= 1
        assert line[f"validation/{kind}_gain"] is None, "validation tasks are not in the list"
    events = EventAccumulator(str(tmp_path)).Reload()
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for page in layout.category for chart in page.chart}
    assert sorted(charts["gain"]) == ["^tasks/gain$", "^validation/greedy_gain$", "^validation/sampled_gain$"]
    assert {"gain by family", "regret", "tasks with growth", "growth by family"} <= set(charts)
