import json
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.config import check_training_config, compose_config
from esper.telemetry import Anomalies, DetailWindow
from esper.telemetry.anomalies import RepeatCounter
from esper.telemetry.checks import CHECKS, CheckState, Finding, Thresholds, check_all
from tests.ppo.fixtures_environments import MatchingEnv, make_collector, make_module, make_trainer
from tests.telemetry.fixtures_runs import train_tiny

DEFAULTS: dict[str, Any] = {
    name: value for name, value in compose_config("run").callbacks.anomalies.thresholds.items() if name != "_target_"
}
HEALTHY = {
    "policy/ratio_max": 1.6, "policy/ratio_min": 0.6, "policy/kl": 0.03, "losses/explained_variance": 0.8,
    "policy/entropy_op": 0.6, "policy/kl_op": 0.02, "policy/entropy_slot": 0.9, "policy/kl_slot": 0.01,
    "policy/available_op": 40.0, "policy/available_slot": 40.0, "policy/entropy_bonus": 0.01,
    "health/gradient_norm": 1.0, "health/skipped": 0.0, "health/lstm_rms": 0.4, "losses/policy": -0.1,
    "losses/value": 0.2, "episode/return": 20.0, "episode/score": 35.0, "seeds/rollbacks": 0.0,
    "seeds/finding_reward_hacking": 0.5, "seeds/finding_ransomware": 0.0,
}  # fmt: skip
ANOMALOUS = {
    "ratio_explosion": {"policy/ratio_max": 5.1},
    "ratio_collapse": {"policy/ratio_min": 0.09},
    "entropy_collapse": {"policy/entropy_op": 0.01},
    "kl_spike": {"policy/kl": 0.11},
    "value_collapse": {"losses/explained_variance": -3.1},
    "gradient_drift": {"health/gradient_norm": 9.0},
    "non_finite": {"losses/value": math.nan},
    "lstm_saturation": {"health/lstm_rms": 11.0},
    "lstm_death": {"health/lstm_rms": 1e-7},
    "reward_hacking": {"seeds/finding_reward_hacking": 6.0},
    "ransomware": {"seeds/finding_ransomware": 6.0},
    "rollbacks": {"seeds/rollbacks": 0.2},
}


def make_thresholds(**changes: Any) -> Thresholds:
    return Thresholds(**{**DEFAULTS, **changes})


def check_rounds(
    *changed: dict[str, float], state: CheckState | None = None, progress: float = 0.5, **changes: Any
) -> list[list[str]]:
    """The names of the findings in each round; `changed` are the metrics that differ from healthy ones, by round."""
    state = state or CheckState()
    return [
        [finding.check for finding in check_all({**HEALTHY, **each}, make_thresholds(**changes), state, progress, ())]
        for each in changed
    ]


def test_a_healthy_run_has_no_findings() -> None:
    assert check_rounds(*[{}] * 30) == [[]] * 30


@pytest.mark.parametrize("name", list(CHECKS))
def test_every_check_finds_its_own_anomaly_and_no_other(name: str) -> None:
    found = check_rounds(*[{}] * 6, *[ANOMALOUS[name]] * 3)
    assert found[:6] == [[]] * 6
    assert name in found[-1] or name in found[-3]
    assert {check for each in found for check in each} == {name}


def test_a_collapse_is_found_after_patience_and_again_only_after_recovery() -> None:
    low, between, well = ({"policy/entropy_op": value} for value in (0.05, 0.1, 0.13))
    found = check_rounds(low, low, between, low, low, low, low, between, low, low, low, well, low, low, low)
    assert [index for index, findings in enumerate(found) if findings] == [5, 14]


def test_a_head_that_was_never_available_has_not_collapsed() -> None:
    forced = {"policy/entropy_op": 0.0, "policy/available_op": 0.0}
    assert check_rounds(*[forced] * 10) == [[]] * 10


def test_the_minimum_explained_variance_rises_during_the_run() -> None:
    poor = {"losses/explained_variance": -4.0}
    late = CheckState(rounds=50)
    assert check_rounds(poor, state=late, progress=0.05) == [[]]
    assert check_rounds(poor, state=late, progress=0.2) == [["value_collapse"]]
    stages = {"value": [[0.5, -0.2], [1.0, 0.1]]}
    middling = {"losses/explained_variance": 0.05}
    assert check_rounds(middling, state=late, progress=0.5, **stages) == [[]]
    assert check_rounds(middling, state=late, progress=0.9, **stages) == [["value_collapse"]]
    not_measured = {"losses/explained_variance": math.nan}
    assert check_rounds(not_measured, state=late, progress=0.9, **stages) == [[]]
    assert check_rounds(poor, progress=0.9) == [[]], "not in the first rounds"


def test_the_gradient_norm_is_compared_with_its_moving_average() -> None:
    steady = [{"health/gradient_norm": 50.0}] * 10
    assert check_rounds(*steady)[-1] == []
    grown = [{"health/gradient_norm": 1.0 * 1.3**index} for index in range(15)]
    assert check_rounds(*grown) == [[]] * 15, "the average follows slow growth"
    assert check_rounds(*steady, {"health/gradient_norm": 5.0})[-1] == ["gradient_drift"]


def test_thresholds_are_configurable() -> None:
    assert check_rounds({"policy/ratio_max": 3.0}) == [[]]
    assert check_rounds({"policy/ratio_max": 3.0}, ratio_high=2.0) == [["ratio_explosion"]]
    assert check_rounds(*[{"policy/entropy_op": 0.3}] * 3, entropy={"other": 0.4})[-1] == ["entropy_collapse"]


def test_checks_without_their_metric_find_nothing() -> None:
    assert check_all({}, make_thresholds(), CheckState(), 0.5, ()) == []


def test_checks_can_be_switched_off() -> None:
    metrics = {**HEALTHY, **ANOMALOUS["kl_spike"]}
    assert check_all(metrics, make_thresholds(), CheckState(), 0.5, ("kl_spike",)) == []


def train_with_findings(directory: Path, count: int = 4, **changes: Any) -> tuple[Any, DetailWindow]:
    """A run whose threshold of ratios every round exceeds."""
    window, env = DetailWindow(), MatchingEnv()
    arguments = {"thresholds": make_thresholds(ratio_high=0.5), "off": [], "on": "log", "detail_rounds": 2, **changes}
    callback = Anomalies(directory, window, count, None, **arguments)
    module = make_module(env)
    make_trainer(count, callbacks=[callback]).fit(module, datamodule=make_collector(module, env))
    return module, window


def test_a_finding_is_a_line_with_its_ratios_and_opens_the_detail_window(tmp_path: Path) -> None:
    module, window = train_with_findings(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "anomalies.jsonl").read_text().splitlines()]
    assert [(line["round"], line["count"]) for line in lines if line["check"] == "ratio_explosion"] == [(1, 1)]
    assert "explodes" in lines[0]["sentence"]
    assert lines[0]["bound"] == 0.5
    assert lines[0]["ratios"]["above"] == len(lines[0]["ratios"]["listed"]) > 0
    assert set(lines[0]["ratios"]["listed"][0]) == {"episode", "step", "head", "option", "ratio"}
    assert module.latest_metrics["health/anomalies"] >= 4, "repeated findings count too"
    assert window.is_open(3)
    assert not window.is_open(4)


def test_a_repeated_finding_is_reported_the_first_and_every_tenth_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module, window = train_with_findings(tmp_path, count=12)
    lines = [json.loads(line) for line in (tmp_path / "anomalies.jsonl").read_text().splitlines()]
    explosions = [line for line in lines if line["check"] == "ratio_explosion"]
    assert [(line["round"], line["count"]) for line in explosions] == [(1, 1), (10, 10)]
    logged = [record.getMessage() for record in caplog.records if "a ratio explodes" in record.getMessage()]
    assert [message.endswith("(10 times so far)") for message in logged] == [False, True]
    assert module.latest_metrics["health/anomalies"] >= 12
    assert window.is_open(12)


def count_rounds(counter: RepeatCounter, *rounds: int, tag: str = "policy/kl") -> list[int]:
    finding = Finding("kl_spike", tag, 1.0, 0.1, "a spike")
    return [counter.count(finding, each) for each in rounds]


def test_findings_are_counted_by_check_and_metric_until_they_are_absent_for_more_than_ten_rounds() -> None:
    counter = RepeatCounter()
    assert count_rounds(counter, 1, 2, 3) == [1, 2, 3]
    assert count_rounds(counter, 3, tag="policy/kl_op") == [1]
    assert count_rounds(counter, 13, 24) == [4, 1]


def test_counts_of_findings_are_restored_from_a_checkpoint_and_may_be_absent_in_it(tmp_path: Path) -> None:
    def make_callback() -> Anomalies:
        return Anomalies(
            tmp_path, DetailWindow(), 9, None, thresholds=make_thresholds(), off=[], on="log", detail_rounds=1
        )

    first, second, third = (make_callback() for _ in range(3))
    count_rounds(first._repeats, 1, 2, 3)
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert count_rounds(second._repeats, 4) == [4]
    del state["repeats"]
    third.load_state_dict(state)
    assert count_rounds(third._repeats, 4) == [1]


def test_a_run_can_stop_at_a_finding(tmp_path: Path) -> None:
    module, _ = train_with_findings(tmp_path, on="stop")
    assert module.counters.rounds == 1


def test_the_state_of_checks_is_restored_from_a_checkpoint(tmp_path: Path) -> None:
    first, second = (
        Anomalies(tmp_path, DetailWindow(), 9, None, thresholds=make_thresholds(), off=[], on="log", detail_rounds=1)
        for _ in range(2)
    )
    first._state.norm, first._state.low = 3.0, {"op": 2}
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second._state == first._state


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"thresholds": make_thresholds(), "on": "log", "detail_rounds": 1}
    with pytest.raises(ValueError, match=r"off=\['nothing'\]: nothing must be one of ratio_explosion"):
        Anomalies(tmp_path, DetailWindow(), 1, None, off=["nothing"], **settings)
    with pytest.raises(ValueError, match=r"thresholds\.value=\[\]: must have at least one pair"):
        make_thresholds(value=[])
    with pytest.raises(ValueError, match=r"thresholds\.entropy=\{'op': 0\.1\}: must have a key other"):
        make_thresholds(entropy={"op": 0.1})


@pytest.mark.parametrize("override", ["on=shout", "thresholds.kl=much", "thresholds.value=[[1]]", "+thresholds.kll=1"])
def test_settings_of_the_wrong_type_are_refused(override: str) -> None:
    prefix = "+" * override.startswith("+")
    typed = f"{prefix}callbacks.anomalies.{override.lstrip('+')}"
    config = compose_config("run", ["+experiment=oracle", typed])
    with pytest.raises(ValueError, match=rf"^callbacks\.anomalies\.{override.lstrip('+').partition('=')[0]}[=:]"):
        check_training_config(config)


def test_a_finding_is_reported_in_the_log_in_tensorboard_and_on_the_dashboard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_tiny(tmp_path, "callbacks.anomalies.thresholds.ratio_high=0.5", "callbacks.dashboard.images=100")
    assert "round 1: a ratio explodes: policy/ratio_max is" in caplog.text
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    assert "anomaly/ratio_explosion/text_summary" in events.Tags()["tensors"]
    assert len(events.Images("pictures/ops")) == 2, "drawn each round in the detail window"
