import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.profiler import ProfilerActivity

from esper.config import compose_config
from esper.lifecycle import Stage
from esper.records import read_lines
from esper.telemetry.dashboard import COMPARED, Dashboard, sweep_settings
from esper.telemetry.episodes import episode_metrics
from esper.telemetry.metrics import METRICS, PAGES, dashboard_layout, find_metric, metrics_page
from esper.telemetry.plots import contributions, frontier, undominated
from esper.telemetry.profiler import activities
from esper.telemetry.timeline import describe_episode, timeline
from esper.training import train
from tests.telemetry.fixtures_runs import TINY, run

pytestmark = pytest.mark.xdist_group("dashboard")  # what they share is made once

ABSENT = {"health/device_memory_gb", "hosts/score_{host}", "hosts/growth_{host}"}  # without a GPU, and with one host


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    run(directory, "ppo.accumulate=1")
    return directory


@pytest.fixture(scope="module")
def events(finished: Path) -> EventAccumulator:
    return EventAccumulator(str(finished), size_guidance={"images": 0, "histograms": 0, "tensors": 0}).Reload()


def test_every_tag_in_the_layout_exists_and_every_page_is_filled(events: EventAccumulator) -> None:
    found = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [page.title for page in found.category] == list(PAGES)
    tags = events.Tags()["scalars"]
    shown = [pattern for page in found.category for chart in page.chart for pattern in chart.multiline.tag]
    assert len(shown) > 50
    for pattern in shown:
        assert any(re.search(pattern, tag) for tag in tags), pattern


def test_every_figure_is_in_the_glossary_and_every_entry_is_reported(events: EventAccumulator) -> None:
    tags = events.Tags()["scalars"]
    assert [tag for tag in tags if find_metric(tag) is None] == []
    entries = {entry.tag for tag in tags if (entry := find_metric(tag)) is not None}
    assert {metric.tag for metric in METRICS} - entries <= ABSENT


def test_the_page_of_the_glossary_is_up_to_date() -> None:
    page = Path(__file__).parent.parent.parent / "docs/metrics.md"
    assert page.read_text() == metrics_page()
    assert "docs/metrics.md" in (page.parent.parent / "README.md").read_text()


def test_a_layout_has_only_what_there_is() -> None:
    assert dashboard_layout(["policy/kl", "unknown/tag"]) == {"Controller": {"KL": ["Multiline", ["^policy/kl$"]]}}


def test_histograms_pictures_words_and_settings_are_there(events: EventAccumulator) -> None:
    tags = events.Tags()
    heads = {f"actions/{head}" for head in ("op", "slot", "blueprint", "blend")}
    assert {*heads, "learning/advantages", "learning/values", "learning/ratios"} <= set(tags["histograms"])
    pictures = ("ops", "timeline", "contribution", "frontier")
    assert {f"pictures/{name}" for name in pictures} == set(tags["images"])
    assert [image.step for image in events.Images("pictures/timeline")] == [24], "the last round is always drawn"
    table = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| environment.steps | 4 |" in table
    assert (
        "the end: score"
        in events.Tensors("diary of the best episode/text_summary")[0].tensor_proto.string_val[0].decode()
    )
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= set(events.summary_metadata)
    assert set(COMPARED) <= set(tags["scalars"])


def test_hyperparameters_are_those_that_runs_are_compared_by() -> None:
    given = {
        "reward": "shaped", "seed": 3, "ppo.lr": 0.1, "ppo._target_": "x", "ppo.gamma": "${gamma}", "policy.hidden": 8,
        "callbacks.progress.every": 1, "host.blocks": 3, "ppo.floors": None,
    }  # fmt: skip
    assert list(sweep_settings(given)) == ["reward", "seed", "ppo.lr", "policy.hidden"]


def test_figures_stand_against_decisions(events: EventAccumulator) -> None:
    for tag in ("seeds/germinated", "health/lstm_rms", "reward/improvement", "time/train"):
        assert [event.step for event in events.Scalars(tag)] == [12, 24]


def test_episodes_are_recorded_as_evaluation_does(finished: Path) -> None:
    lines = list(read_lines(finished / "episodes.jsonl"))
    kinds = [(line["round"], line["kind"]) for line in lines]
    assert kinds == [(1, "training")] * 3 + [(2, "training")] * 3 + [(2, "sampled")] * 3 + [(2, "greedy")] * 3
    assert all(len(line["steps"]) == 4 and line["data"] == "synthetic_images" for line in lines)


def test_telemetry_changes_no_weight(finished: Path, tmp_path: Path) -> None:
    names = ("episodes", "health", "anomalies", "dashboard", "rounds", "progress")
    run(tmp_path, "logger=none", *[f"callbacks.{name}=null" for name in names])
    mine, theirs = (torch.load(d / "checkpoints/last.ckpt", weights_only=True) for d in (finished, tmp_path))
    assert mine["state_dict"].keys() == theirs["state_dict"].keys()
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in mine["state_dict"].items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "summary.json"]


def test_held_out_episodes_that_are_played_again_are_recorded_once(tmp_path: Path) -> None:
    run(tmp_path, "rounds=1")
    config = compose_config("run", [*TINY, "rounds=1"])
    before = (tmp_path / "episodes.jsonl").read_text()
    (tmp_path / ".hydra").mkdir()
    train(config, tmp_path, Console(quiet=True), [])
    assert (tmp_path / "episodes.jsonl").read_text() == before
    last = list(read_lines(tmp_path / "rounds.jsonl"))[-1]
    assert last["validation/greedy_score"] is not None
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert summary["episode/score"] == last["episode/score"], "a run with nothing left to play keeps its figures"


def step(**changes: Any) -> dict[str, Any]:
    quiet = {
        "action": {"op": "WAIT"}, "parts": {"rent": -1.0}, "findings": [], "entered": [[], []], "rollback": None,
        "contribution": [None, None], "blueprint": [None, None], "stage": ["DORMANT"] * 2, "alpha": [0.0, 0.0],
        "score": 30.0, "parameters": 100.0, "train_loss": 1.0, "train_accuracy": 0.5, "gradient_norm": 2.0,
        "health": None,
    }  # fmt: skip
    return {**quiet, **changes}


def grown() -> dict[str, Any]:
    steps = [
        step(),
        step(
            action={"op": "GERMINATE", "blueprint": "norm"}, entered=[[], ["GERMINATED"]], blueprint=[None, "norm"],
            findings=["ransomware:b"],
        ),
        step(entered=[[], ["HOLDING"]], blueprint=[None, "norm"], contribution=[None, 2.5]),
        step(entered=[[], ["FOSSILIZED"]], blueprint=[None, "norm"]),
        step(rollback="COLLAPSED"),
    ]  # fmt: skip
    about = {"slots": ["a", "b"], "fossilized": 1, "pruned": 0, "rollbacks": 1, "host_parameters": 80, "score": 29.0}
    return {**about, "steps": steps}


def test_figures_of_episodes_are_means_over_them() -> None:
    idle = {**grown(), "steps": [step()] * 5, "fossilized": 0, "rollbacks": 0}
    found = episode_metrics([grown(), idle], ["conv_light", "norm"])
    assert found["seeds/germinated"] == found["seeds/fossilized"] == found["seeds/rollbacks"] == 0.5
    assert found["seeds/first"] == 1
    assert (found["seeds/germinated_norm"], found["seeds/germinated_conv_light"]) == (0.5, 0)
    assert found["seeds/contribution"] == 2.5
    assert (found["seeds/fossilized_a"], found["seeds/fossilized_b"]) == (0, 0.5)
    assert found["seeds/finding_ransomware"] == 0.5
    assert found["reward/rent"] == -5
    assert found["host/health"] != found["host/health"], "not measured"


def test_of_several_hosts_each_has_its_own_score_and_growth() -> None:
    lines = [
        {**grown(), "host": host, "score": score, "parameters": parameters}
        for host, score, parameters in (("blind", 40.0, 160.0), ("wide", 20.0, 80.0), ("blind", 42.0, 320.0))
    ]
    found = episode_metrics(lines, ["conv_light", "norm"], ["blind", "wide", "deep"])
    assert (found["hosts/score_blind"], found["hosts/growth_blind"]) == (41, 3)
    assert (found["hosts/score_wide"], found["hosts/growth_wide"]) == (20, 1)
    assert found["hosts/score_deep"] != found["hosts/score_deep"], (
        "not drawn in this round, but all rounds have one name"
    )
    assert not any(tag.startswith("hosts/") for tag in episode_metrics([grown()], ["norm"]))


def test_the_diary_tells_what_happened_in_order() -> None:
    assert describe_episode(grown()).splitlines() == [
        "- step 1: norm in b germinates",
        "- step 2: norm in b is fully in and held, contributing +2.5 points",
        "- step 3: norm in b is fossilised, contributing +2.5 points",
        "- step 4: the governor brings the host back (collapsed)",
        "- the end: score 30.00, 100 parameters, of the host 80",
    ]


def test_pictures_show_what_they_are_given() -> None:
    figure = timeline({"first": grown(), "second": grown()})
    assert [axes.get_title() for axes in figure.axes[:2]] == ["first", "second"]
    assert [text.get_text() for text in contributions([grown()]).axes[0].texts] == ["+2.5 (1)"]
    assert len(contributions([{**grown(), "steps": [step()]}]).axes[0].texts) == 0
    line = frontier([3, 1, 2, 2], [5.0, 1.0, 4.0, 3.0]).axes[0].lines[0]
    assert list(line.get_xdata()) == [1, 2, 3]
    assert undominated([1, 2, 3], [5, 4, 3]) == [0]


def test_every_stage_has_its_verb_in_the_diary() -> None:
    steps = [
        step(entered=[[stage.name], []], blueprint=["norm", None]) for stage in Stage if stage is not Stage.DORMANT
    ]
    assert len(describe_episode({**grown(), "steps": steps}).splitlines()) == len(Stage)


def test_bad_intervals_are_refused() -> None:
    with pytest.raises(ValueError, match=r"callbacks.dashboard.images=0"):
        Dashboard({}, None, None, histograms=1, images=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "xpu", "mps"])
def test_the_profiler_records_the_devices_own_activities_where_torch_can(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    assert activities(torch.device("cpu")) == [ProfilerActivity.CPU]
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: set(ProfilerActivity.__members__.values()))
    wanted = {"cpu": [], "cuda:1": ["CUDA"], "xpu": ["XPU"], "mps": ["MPS"]}[device]
    known = [name for name in wanted if hasattr(ProfilerActivity, name)]
    assert [activity.name for activity in activities(torch.device(device))] == ["CPU", *known]


@pytest.mark.parametrize(("preset", "pattern"), [("simple", "*profile*"), ("torch", "*profile*")])
def test_profilers_write_into_the_runs_directory(tmp_path: Path, preset: str, pattern: str) -> None:
    run(tmp_path, f"profiler={preset}", "rounds=1", "environment.envs=1", "environment.steps=1", "ppo.epochs=1")
    assert [path for path in tmp_path.glob(pattern) if path.stat().st_size > 0]
