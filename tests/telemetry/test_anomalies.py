import json
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.config import compose_config
from esper.ppo import Collector
from esper.telemetry import Anomalies, DetailWindow
from esper.telemetry.checks import CHECKS, CheckState, Thresholds, check_all
from tests.ppo.fixtures_environments import Locks, learner, trainer
from tests.telemetry.fixtures_runs import run

SHIPPED: dict[str, Any] = dict(compose_config("run").callbacks.anomalies.thresholds)
HEALTHY = {
    "policy/ratio_max": 1.6, "policy/ratio_min": 0.6, "policy/kl": 0.03, "losses/explained_variance": 0.8,
    "policy/entropy_op": 0.6, "policy/kl_op": 0.02, "policy/entropy_slot": 0.9, "policy/kl_slot": 0.01,
    "policy/available_op": 40.0, "policy/available_slot": 40.0, "policy/entropy_bonus": 0.01,
    "health/gradient_norm": 1.0, "health/skipped": 0.0, "health/lstm_rms": 0.4, "losses/policy": -0.1,
    "losses/value": 0.2, "episode/return": 20.0, "episode/score": 35.0, "seeds/rollbacks": 0.0,
    "seeds/finding_reward_hacking": 0.5, "seeds/finding_ransomware": 0.0,
}  # fmt: skip
ILL = {
    "ratio_explosion": {"policy/ratio_max": 5.1},
    "ratio_collapse": {"policy/ratio_min": 0.09},
    "entropy_collapse": {"policy/entropy_op": 0.01},
    "kl_spike": {"policy/kl": 0.11},
    "value_collapse": {"losses/explained_variance": -0.1},
    "gradient_drift": {"health/gradient_norm": 9.0},
    "non_finite": {"losses/value": math.nan},
    "lstm_saturation": {"health/lstm_rms": 11.0},
    "lstm_death": {"health/lstm_rms": 1e-7},
    "reward_hacking": {"seeds/finding_reward_hacking": 6.0},
    "ransomware": {"seeds/finding_ransomware": 6.0},
    "rollbacks": {"seeds/rollbacks": 0.2},
}


def thresholds(**changes: Any) -> Thresholds:
    return Thresholds(**{**SHIPPED, **changes})


def rounds(
    *figures: dict[str, float], remembered: CheckState | None = None, progress: float = 0.5, **changes: Any
) -> list[list[str]]:
    """The names of what is found in each of some rounds."""
    memory = remembered or CheckState()
    return [
        [finding.check for finding in check_all({**HEALTHY, **each}, thresholds(**changes), memory, progress, ())]
        for each in figures
    ]


def test_a_healthy_run_is_silent() -> None:
    assert rounds(*[{}] * 30) == [[]] * 30


@pytest.mark.parametrize("name", list(CHECKS))
def test_every_check_is_tripped_by_its_figure_and_by_nothing_else(name: str) -> None:
    found = rounds(*[{}] * 6, *[ILL[name]] * 3)
    assert found[:6] == [[]] * 6
    assert name in found[-1] or name in found[-3]
    assert {check for each in found for check in each} == {name}


def test_a_collapse_needs_patience_is_told_once_and_again_only_after_recovery() -> None:
    low, between, well = ({"policy/entropy_op": value} for value in (0.05, 0.1, 0.13))
    found = rounds(low, low, between, low, low, low, low, between, low, low, low, well, low, low, low)
    told = [bool(each) for each in found]
    assert [index for index, there in enumerate(told) if there] == [5, 14]


def test_a_head_that_nobody_could_ask_has_not_collapsed() -> None:
    forced = {"policy/entropy_op": 0.0, "policy/available_op": 0.0}
    assert rounds(*[forced] * 10) == [[]] * 10


def test_what_a_critic_must_foretell_grows_with_the_run() -> None:
    poor = {"losses/explained_variance": -0.3}
    late = CheckState(rounds=50)
    assert rounds(poor, remembered=late, progress=0.05) == [[]]
    assert rounds(poor, remembered=late, progress=0.2) == [["value_collapse"]]
    middling = {"losses/explained_variance": 0.05}
    assert rounds(middling, remembered=late, progress=0.5) == [[]]
    assert rounds(middling, remembered=late, progress=0.9) == [["value_collapse"]]
    assert rounds(poor, progress=0.9) == [[]], "not in its first rounds"


def test_gradients_are_held_against_their_own_moving_average() -> None:
    steady = [{"health/gradient_norm": 50.0}] * 10
    assert rounds(*steady)[-1] == []
    grown = [{"health/gradient_norm": 1.0 * 1.3**index} for index in range(15)]
    assert rounds(*grown) == [[]] * 15, "it follows slow growth"
    assert rounds(*steady, {"health/gradient_norm": 5.0})[-1] == ["gradient_drift"]


def test_thresholds_are_configuration() -> None:
    assert rounds({"policy/ratio_max": 3.0}) == [[]]
    assert rounds({"policy/ratio_max": 3.0}, ratio_high=2.0) == [["ratio_explosion"]]
    assert rounds(*[{"policy/entropy_op": 0.3}] * 3, entropy={"other": 0.4})[-1] == ["entropy_collapse"]


def test_checks_without_their_figure_say_nothing() -> None:
    assert check_all({}, thresholds(), CheckState(), 0.5, ()) == []


def test_checks_can_be_switched_off() -> None:
    figures = {**HEALTHY, **ILL["kl_spike"]}
    assert check_all(figures, thresholds(), CheckState(), 0.5, ("kl_spike",)) == []


def watched(directory: Path, count: int = 4, **changes: Any) -> tuple[Any, DetailWindow]:
    """A real run whose thresholds no policy can satisfy."""
    attention, world = DetailWindow(), Locks()
    given = {"thresholds": {**SHIPPED, "ratio_high": 0.5}, "off": [], "on": "log", "closely": 2, **changes}
    callback = Anomalies(directory, attention, count, None, **given)
    module = learner(world)
    trainer(count, callbacks=[callback]).fit(module, datamodule=Collector(world, run_seed=0, warmup=0))
    return module, attention


def test_a_finding_is_a_line_with_the_offending_ratios_and_raises_attention(tmp_path: Path) -> None:
    module, attention = watched(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "anomalies.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if line["check"] == "ratio_explosion"] == [1, 2, 3, 4]
    assert "explodes" in lines[0]["sentence"]
    assert lines[0]["bound"] == 0.5
    assert lines[0]["ratios"]["above"] == len(lines[0]["ratios"]["listed"]) > 0
    assert set(lines[0]["ratios"]["listed"][0]) == {"episode", "step", "head", "option", "ratio"}
    assert module.latest_metrics["health/anomalies"] == len(lines)
    assert attention.raised(6)
    assert not attention.raised(7)


def test_a_run_can_be_made_to_stop_at_a_finding(tmp_path: Path) -> None:
    module, _ = watched(tmp_path, on="stop")
    assert module.counters.rounds == 1


def test_what_checks_remember_survives_a_checkpoint(tmp_path: Path) -> None:
    first, second = (
        Anomalies(tmp_path, DetailWindow(), 9, None, thresholds=SHIPPED, off=[], on="log", detail_rounds=1)
        for _ in range(2)
    )
    first._remembered.norm, first._remembered.low = 3.0, {"op": 2}
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second._remembered == first._remembered


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"off": ["nothing"]}, r"callbacks.anomalies.off=\['nothing'\]: nothing is none of ratio_explosion"),
        ({"on": "shout"}, r"callbacks.anomalies.on=shout: must be log or stop"),
        ({"thresholds": {**SHIPPED, "value": []}}, r"callbacks.anomalies.thresholds: value must have a pair"),
        ({"thresholds": {"kll": 1}}, r"callbacks.anomalies.thresholds: .*kll"),
    ],
)
def test_bad_settings_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    given = {"thresholds": SHIPPED, "off": [], "on": "log", "closely": 1, **change}
    with pytest.raises(ValueError, match=sentence):
        Anomalies(tmp_path, DetailWindow(), 1, None, **given)


def test_a_finding_in_a_real_run_reaches_log_tensorboard_and_dashboards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, "callbacks.anomalies.thresholds.ratio_high=0.5", "callbacks.dashboard.images=100")
    assert "round 1: a ratio explodes: policy/ratio_max is" in caplog.text
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert "anomaly/ratio_explosion/text_summary" in events.Tags()["tensors"]
    assert len(events.Images("pictures/ops")) == 2, "drawn each round while attention is raised"
