import json
from pathlib import Path
from typing import Any

import pytest

from esper.records import RECORD_VERSION, EpisodeRecord, LineWriter, StepEntry, read_episodes, read_rounds
from esper.records.record import READABLE


def make_record(**changes: Any) -> EpisodeRecord:
    step = StepEntry(
        action={"op": "GERMINATE", "slot": "block1", "blueprint": "norm"}, score=31.5, stage=["GERMINATED", "DORMANT"],
        alpha=[0.0, 0.0], blueprint=["norm", None], entered=[["GERMINATED"], []], contribution=[None, None],
        legal=["WAIT", "GERMINATE"], reward=0.5, reward_terms={"improvement": 0.75, "rent": -0.25},
        findings=["ransomware:block1"], parameters=110.0, isolated_gain=[0.125, None],
    )  # fmt: skip
    known: dict[str, Any] = {
        "arm": "ppo", "episode_seed": 7, "data": "synthetic_images", "slots": ["block1", "block2"],
        "fossils": {"block1": ("norm", "ADD")}, "host_parameters": 100, "parameters": 110.0, "parameters_peak": 120.0,
        "parameters_mean": 105.0, "flops": 2e9, "score": 31.5, "steps": [step, step], "episode_return": 1.0,
        "split": "test", "test_score": 31.5, "checkpoint": "last.ckpt", "inputs_digest": "abc", "variant": "seed 1",
        "flops_by_part": {"training": 1e9, "validation": 1e9},
    }  # fmt: skip
    return EpisodeRecord(**{**known, **changes})


def to_version_2(record: EpisodeRecord) -> dict[str, Any]:
    """A record as version 2 wrote it: old keys, and no split."""
    old_names = {
        "arm": "controller", "checkpoint": "learner", "episode_seed": "seed", "inputs_digest": "origin",
        "variant": "rule", "flops_by_part": "spent", "episode_return": "return", "reward_terms": "parts",
        "isolated_gain": "promise",
    }  # fmt: skip

    def rename(data: dict[str, Any]) -> dict[str, Any]:
        return {old_names.get(key, key): value for key, value in data.items()}

    data = {**record.to_dict(), "version": 2}
    data.pop("split", None)
    return {**rename(data), "steps": [rename(step) for step in data["steps"]]}


def test_a_record_survives_a_round_trip_through_json() -> None:
    record = make_record()
    assert EpisodeRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_optional_fields_with_their_default_are_not_written_and_are_restored() -> None:
    record = make_record(split="validation", test_score=None, flops_by_part={}, variant="")
    data = record.to_dict()
    assert data["version"] == RECORD_VERSION
    assert not {"split", "test_score", "flops_by_part", "variant", "seconds"} & data.keys()
    assert EpisodeRecord.from_dict(data) == record


def test_a_field_that_is_unknown_here_is_ignored() -> None:
    record = make_record()
    assert EpisodeRecord.from_dict({**record.to_dict(), "mood": "good"}) == record


def test_a_record_of_version_2_is_read() -> None:
    record = make_record()
    data = to_version_2(record)
    assert {"controller", "learner", "seed", "origin", "rule", "spent", "return"} <= data.keys()
    assert {"parts", "promise"} <= data["steps"][0].keys()
    assert EpisodeRecord.from_dict(json.loads(json.dumps(data))) == record


def test_the_configuration_of_a_record_of_version_2_has_todays_names() -> None:
    old = {"governor": {"_target_": "esper.environment.Governor", "least": 3}}
    record = EpisodeRecord.from_dict({**to_version_2(make_record()), "config": old})
    assert record.config == {"governor": {"_target_": "esper.environment.Governor", "min_history": 3}}


def test_the_split_of_version_2_is_test_if_there_is_a_test_score() -> None:
    validated = to_version_2(make_record(split="validation", test_score=None))
    assert "test_score" not in validated
    assert EpisodeRecord.from_dict(validated).split == "validation"
    assert EpisodeRecord.from_dict({**validated, "test_score": 30.0}).split == "test"
    assert EpisodeRecord.from_dict({**validated, "test_score": None}).split == "test", "non-finite test score"


def test_growth_and_germinations_are_derived() -> None:
    record = make_record()
    assert record.growth == pytest.approx(1.1)
    assert [(germination.step, germination.slot, germination.blueprint) for germination in record.germinations] == [
        (0, "block1", "norm"),
        (1, "block1", "norm"),
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": None}, "is not an episode record"),
        ({"version": 1}, "is an episode record of version 1; must be 2 or 3"),
        ({"version": RECORD_VERSION + 1}, f"is an episode record of version {RECORD_VERSION + 1}; must be 2 or 3"),
        ({"version": "3"}, "is an episode record of version 3; must be 2 or 3"),
        ({"arm": None}, "is an episode record without a valid arm"),
        ({"slots": "block1", "flops": "many"}, "is an episode record without a valid slots, flops"),
        ({"steps": []}, "is an episode record without a valid steps"),
        ({"steps": [{"action": {"op": "WAIT"}}]}, "is an episode record without a valid steps"),
        ({"steps": [3]}, "is an episode record without a valid steps"),
    ],
)
def test_an_invalid_record_is_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole sentence is compared
        EpisodeRecord.from_dict({**make_record().to_dict(), **change})
    assert str(caught.value) == sentence


@pytest.mark.parametrize("value", [None, 3, "text", [], {}])
def test_a_value_that_is_not_a_record_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^is not an episode record$"):
        EpisodeRecord.from_dict(value)


def test_unreadable_lines_are_left_out_with_a_sentence_each(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    good, old = make_record().to_dict(), to_version_2(make_record(arm="none"))
    lines = [good, {**good, "version": 1}, 3, {}, old]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n" + json.dumps(good)[:40])
    episodes, messages = read_episodes(path)
    assert [episode.arm for episode in episodes] == ["ppo", "none"]
    assert messages == [
        f"{path}: line 2 is an episode record of version 1; must be 2 or 3; it is left out.",
        f"{path}: each of lines 3 to 4 is not an episode record; they are left out.",
        f"{path}: line 6 is not JSON; it is left out.",
        f"{path}: line 7 was cut off; it is left out.",
        f"{path}: 5 lines could not be read, 2 could.",
    ]


def test_a_readable_file_has_no_messages(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    writer = LineWriter(path)
    writer.write(make_record().to_dict(), make_record(episode_seed=8).to_dict())
    writer.close()
    episodes, messages = read_episodes(path)
    assert [episode.episode_seed for episode in episodes] == [7, 8]
    assert messages == []


def test_a_writer_removes_an_incomplete_last_line_and_all_lines_if_fresh(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text('{"round": 1}\n{"rou')
    writer = LineWriter(path)
    writer.write({"round": 2})
    writer.close()
    assert read_rounds(path) == [{"round": 1}, {"round": 2}]
    LineWriter(path, fresh=True).close()
    assert read_rounds(path) == []


def test_rounds_are_empty_without_a_file_and_a_line_without_a_round_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    assert read_rounds(path) == []
    for content in ("3\n", "{\n", '{"episode/score": 3}\n'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"rounds.jsonl: line 1 is not a round record\.$"):
            read_rounds(path)


def test_all_readable_versions_are_tested_here() -> None:
    assert READABLE == (2, 3)
