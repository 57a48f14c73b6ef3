import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2
from torch.profiler import ProfilerActivity

from esper.config import compose_config
from esper.lifecycle import Stage
from esper.records import EpisodeRecord, StepEntry, read_lines
from esper.telemetry.dashboard import HPARAM_METRICS, Dashboard, sweep_settings
from esper.telemetry.episodes import episode_metrics
from esper.telemetry.metrics import METRICS, PAGES, dashboard_layout, find_metric, metrics_page
from esper.telemetry.plots import contributions, frontier, pareto_frontier
from esper.telemetry.profiler import activities
from esper.telemetry.timeline import describe_episode, timeline
from esper.training import train
from tests.telemetry.fixtures_runs import TINY, train_tiny

pytestmark = pytest.mark.xdist_group("dashboard")  # so that the run they share is made once

ABSENT = {"health/device_memory_gb", "hosts/score_{host}", "hosts/growth_{host}"}  # without a GPU, and with one host
ABSENT |= {f"tasks/{name}" for name in ("gain", "gain_{family}", "grew", "grew_{family}", "regret")}
ABSENT |= {"validation/{kind}_gain"}  # without a task distribution
ABSENT |= {"policy/advantage_scale", "policy/critic_gflops", "health/critic"}  # of parts that are off by default


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    train_tiny(directory, "ppo.accumulate=1")
    return directory


@pytest.fixture(scope="module")
def events(finished: Path) -> EventAccumulator:
    return EventAccumulator(str(finished), size_guidance={"images": 0, "histograms": 0, "tensors": 0}).Reload()


def test_every_tag_in_the_layout_exists_and_every_page_is_filled(events: EventAccumulator) -> None:
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [page.title for page in layout.category] == list(PAGES)
    tags = events.Tags()["scalars"]
    shown = [pattern for page in layout.category for chart in page.chart for pattern in chart.multiline.tag]
    assert len(shown) > 50
    for pattern in shown:
        assert any(re.search(pattern, tag) for tag in tags), pattern


def test_every_reported_metric_is_in_the_table_and_every_entry_is_reported(events: EventAccumulator) -> None:
    tags = events.Tags()["scalars"]
    assert [tag for tag in tags if find_metric(tag) is None] == []
    entries = {entry.tag for tag in tags if (entry := find_metric(tag)) is not None}
    assert {metric.tag for metric in METRICS} - entries <= ABSENT


def test_the_page_of_metrics_is_up_to_date() -> None:
    page = Path(__file__).parent.parent.parent / "docs/metrics.md"
    assert page.read_text() == metrics_page()
    assert "docs/metrics.md" in (page.parent.parent / "README.md").read_text()


def test_the_layout_has_known_tags_only() -> None:
    assert dashboard_layout(["policy/kl", "unknown/tag"]) == {"Controller": {"KL": ["Multiline", ["^policy/kl$"]]}}


def test_histograms_images_texts_and_hyperparameters_are_written(events: EventAccumulator) -> None:
    tags = events.Tags()
    heads = {f"actions/{head}" for head in ("op", "slot", "blueprint", "blend")}
    assert {*heads, "learning/advantages", "learning/values", "learning/ratios"} <= set(tags["histograms"])
    images = ("ops", "timeline", "contribution", "frontier")
    assert {f"pictures/{name}" for name in images} == set(tags["images"])
    assert [image.step for image in events.Images("pictures/timeline")] == [24], "the last round is always drawn"
    table = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| environment.steps | 4 |" in table
    text = events.Tensors("events of the best episode/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "end: score" in text


def test_the_page_of_hyperparameters_has_settings_and_metrics(events: EventAccumulator) -> None:
    contents = {
        name: plugin_data_pb2.HParamsPluginData.FromString(events.SummaryMetadata(name).plugin_data.content)
        for name in ("_hparams_/experiment", "_hparams_/session_start_info")
    }
    columns = contents["_hparams_/experiment"].experiment.metric_infos
    assert [column.name.tag for column in columns] == list(HPARAM_METRICS)
    values = contents["_hparams_/session_start_info"].session_start_info.hparams
    assert (values["environment.steps"].number_value, values["seed"].number_value) == (4, 0)
    steps = {tag: [event.step for event in events.Scalars(tag)] for tag in HPARAM_METRICS}
    assert steps == {tag: [24] if tag.startswith("validation") else [12, 24] for tag in HPARAM_METRICS}


def test_hyperparameters_are_the_plain_settings_that_sweeps_change() -> None:
    settings = {
        "reward": "shaped", "seed": 3, "ppo.lr": 0.1, "ppo._target_": "x", "ppo.gamma": "${gamma}", "policy.hidden": 8,
        "callbacks.progress.every": 1, "host.blocks": 3, "ppo.floors": None,
    }  # fmt: skip
    assert list(sweep_settings(settings)) == ["reward", "seed", "ppo.lr", "policy.hidden"]


def test_metrics_are_logged_against_decisions(events: EventAccumulator) -> None:
    for tag in ("seeds/germinated", "health/lstm_rms", "reward/improvement", "time/train"):
        assert [event.step for event in events.Scalars(tag)] == [12, 24]


def test_training_and_validation_episodes_are_written(finished: Path) -> None:
    lines = list(read_lines(finished / "episodes.jsonl"))
    kinds = [(line["round"], line["kind"]) for line in lines]
    assert kinds == [(1, "training")] * 3 + [(2, "training")] * 3 + [(2, "sampled")] * 3 + [(2, "greedy")] * 3
    assert all(len(line["steps"]) == 4 and line["data"] == "synthetic_images" for line in lines)


def test_telemetry_does_not_change_the_weights(finished: Path, tmp_path: Path) -> None:
    names = ("episodes", "health", "anomalies", "dashboard", "rounds", "progress")
    train_tiny(tmp_path, "logger=none", *[f"callbacks.{name}=null" for name in names])
    with_telemetry, without = (
        torch.load(directory / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for directory in (finished, tmp_path)
    )
    assert with_telemetry.keys() == without.keys()
    assert all(torch.equal(value, without[name]) for name, value in with_telemetry.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "summary.json"]


def test_validation_episodes_that_run_again_are_written_once(tmp_path: Path) -> None:
    train_tiny(tmp_path, "rounds=1")
    config = compose_config("run", [*TINY, "rounds=1"])
    before = (tmp_path / "episodes.jsonl").read_text()
    (tmp_path / ".hydra").mkdir()
    train(config, tmp_path, Console(quiet=True), [])
    assert (tmp_path / "episodes.jsonl").read_text() == before
    last = list(read_lines(tmp_path / "rounds.jsonl"))[-1]
    assert last["validation/greedy_score"] is not None
    summary = json.loads((tmp_path / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert summary["episode/score"] == last["episode/score"], "a finished run that is resumed keeps its metrics"


def make_step(**changes: Any) -> StepEntry:
    quiet: dict[str, Any] = {
        "action": {"op": "WAIT"}, "reward_terms": {"rent": -1.0}, "findings": [], "entered": [[], []], "rollback": None,
        "contribution": [None, None], "blueprint": [None, None], "stage": ["DORMANT"] * 2, "alpha": [0.0, 0.0],
        "score": 30.0, "parameters": 100.0, "train_loss": 1.0, "train_accuracy": 0.5, "gradient_norm": 2.0,
        "health": None,
    }  # fmt: skip
    return StepEntry(**{**quiet, **changes})


def make_episode(**changes: Any) -> EpisodeRecord:
    steps = [
        make_step(),
        make_step(
            action={"op": "GERMINATE", "blueprint": "norm"}, entered=[[], ["GERMINATED"]], blueprint=[None, "norm"],
            findings=["ransomware:b"],
        ),
        make_step(entered=[[], ["HOLDING"]], blueprint=[None, "norm"], contribution=[None, 2.5]),
        make_step(entered=[[], ["FOSSILIZED"]], blueprint=[None, "norm"]),
        make_step(rollback="COLLAPSED"),
    ]  # fmt: skip
    known: dict[str, Any] = {
        "arm": "ppo", "episode_seed": 1, "data": "synthetic", "slots": ["a", "b"], "fossils": {"b": ("norm", "ADD")},
        "fossilized": 1, "pruned": 0, "rollbacks": 1, "host_parameters": 80, "parameters": 100.0,
        "parameters_peak": 100.0, "parameters_mean": 100.0, "flops": 1e9, "score": 29.0, "steps": steps,
    }  # fmt: skip
    return EpisodeRecord(**{**known, **changes})


def test_metrics_of_episodes_are_means_over_them() -> None:
    idle = make_episode(steps=[make_step()] * 5, fossilized=0, rollbacks=0)
    metrics = episode_metrics([make_episode(), idle], ["a", "b"], ["conv_light", "norm"])
    assert metrics["seeds/germinated"] == metrics["seeds/fossilized"] == metrics["seeds/rollbacks"] == 0.5
    assert metrics["seeds/first"] == 1
    assert (metrics["seeds/germinated_norm"], metrics["seeds/germinated_conv_light"]) == (0.5, 0)
    assert metrics["seeds/contribution"] == 2.5
    assert (metrics["seeds/fossilized_a"], metrics["seeds/fossilized_b"]) == (0, 0.5)
    assert metrics["seeds/finding_ransomware"] == 0.5
    assert metrics["reward/rent"] == -5
    assert metrics["host/health"] != metrics["host/health"], "not measured"


def test_each_of_several_hosts_or_families_of_tasks_has_its_own_score_and_growth() -> None:
    episodes = [
        make_episode(host=host, score=score, parameters=parameters)
        for host, score, parameters in (("blind1", 40.0, 160.0), ("wide", 20.0, 80.0), ("blind2", 42.0, 320.0))
    ]
    families = {"blind1": "blind", "blind2": "blind", "wide": "wide", "deep": "deep"}
    metrics = episode_metrics(episodes, ["a", "b"], ["norm"], families)
    assert (metrics["hosts/score_blind"], metrics["hosts/growth_blind"]) == (41, 3)
    assert (metrics["hosts/score_wide"], metrics["hosts/growth_wide"]) == (20, 1)
    assert metrics["hosts/score_deep"] != metrics["hosts/score_deep"], "NaN: no episode of this round has it"
    assert not any(tag.startswith("hosts/") for tag in episode_metrics([make_episode()], ["a", "b"], ["norm"]))


def test_only_hosts_that_have_a_slot_count_for_it() -> None:
    small = make_episode(slots=["b"], steps=[make_step(entered=[[]], blueprint=[None])], fossilized=0)
    metrics = episode_metrics([make_episode(), small], ["a", "b", "c"], ["norm"])
    assert (metrics["seeds/fossilized_a"], metrics["seeds/fossilized_b"]) == (0, 0.5)
    assert metrics["seeds/fossilized_c"] != metrics["seeds/fossilized_c"], "NaN: no host of this round has it"
    drawn = contributions([small, make_episode()]).axes[0]
    assert [label.get_text() for label in drawn.get_xticklabels()] == ["a", "b"], "all slots, in the order of the host"


def test_an_episode_is_described_by_its_events_in_order() -> None:
    assert describe_episode(make_episode()).splitlines() == [
        "- step 1: norm in b germinates",
        "- step 2: norm in b is fully blended in and held, contribution +2.5 points",
        "- step 3: norm in b is fossilised, contribution +2.5 points",
        "- step 4: the governor rolls the host back (collapsed)",
        "- end: score 30.00, 100 parameters (80 of the host)",
    ]


def test_figures_show_their_arguments() -> None:
    figure = timeline({"first": make_episode(), "second": make_episode()})
    assert [axes.get_title() for axes in figure.axes[:2]] == ["first", "second"]
    assert [text.get_text() for text in contributions([make_episode()]).axes[0].texts] == ["+2.5 (1)"]
    assert len(contributions([make_episode(steps=[make_step()])]).axes[0].texts) == 0
    line = frontier([3, 1, 2, 2], [5.0, 1.0, 4.0, 3.0]).axes[0].lines[0]
    assert list(line.get_xdata()) == [1, 2, 3]
    assert pareto_frontier([1, 2, 3], [5, 4, 3]) == [0]


def test_every_stage_has_a_verb() -> None:
    steps = [
        make_step(entered=[[stage.name], []], blueprint=["norm", None]) for stage in Stage if stage is not Stage.DORMANT
    ]
    assert len(describe_episode(make_episode(steps=steps)).splitlines()) == len(Stage)


def test_bad_intervals_are_refused() -> None:
    with pytest.raises(ValueError, match=r"callbacks.dashboard.images=0"):
        Dashboard({}, None, None, histograms=1, images=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "xpu", "mps"])
def test_the_profiler_records_the_activities_of_the_device_if_torch_supports_them(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    assert activities(torch.device("cpu")) == [ProfilerActivity.CPU]
    monkeypatch.setattr(torch.profiler, "supported_activities", lambda: set(ProfilerActivity.__members__.values()))
    expected = {"cpu": [], "cuda:1": ["CUDA"], "xpu": ["XPU"], "mps": ["MPS"]}[device]
    known = [name for name in expected if hasattr(ProfilerActivity, name)]
    assert [activity.name for activity in activities(torch.device(device))] == ["CPU", *known]


@pytest.mark.parametrize(("preset", "pattern"), [("simple", "*profile*"), ("torch", "*profile*")])
def test_profilers_write_into_the_directory_of_the_run(tmp_path: Path, preset: str, pattern: str) -> None:
    train_tiny(tmp_path, f"profiler={preset}", "rounds=1", "environment.envs=1", "environment.steps=1", "ppo.epochs=1")
    assert [path for path in tmp_path.glob(pattern) if path.stat().st_size > 0]
