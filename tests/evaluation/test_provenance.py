import json
from pathlib import Path

import pytest

from esper.evaluation.provenance import EVALUATION_FILE, Provenance, merge_provenance, read_provenance

FULL = Provenance(
    commands=["a command"],
    versions={"torch": "1"},
    checkpoints={"a": {"rounds": 2, "gflops": None, "acts": "greedy"}},
    remarks=["a remark"],
    reference="ppo",
    search_gflops=1.5,
)


def write_evaluation(directory: Path, content: object) -> Path:
    (directory / EVALUATION_FILE).write_text(json.dumps(content))
    return directory


def test_provenance_survives_json() -> None:
    assert Provenance.from_dict(json.loads(json.dumps(FULL.to_dict()))) == FULL
    assert Provenance.from_dict(Provenance().to_dict()) == Provenance()


def test_provenance_is_read_next_to_the_results(tmp_path: Path) -> None:
    assert read_provenance(write_evaluation(tmp_path, {**FULL.to_dict(), "tasks": {}})) == FULL


def test_keys_of_version_0_1_are_read(tmp_path: Path) -> None:
    saved = FULL.to_dict()
    saved["learners"], saved["searched"] = saved.pop("checkpoints"), saved.pop("search_gflops")
    assert read_provenance(write_evaluation(tmp_path, saved)) == FULL


@pytest.mark.parametrize("content", [[1], {}, {"commands": "a", "versions": [], "reference": 3, "search_gflops": "1"}])
def test_values_of_the_wrong_type_are_ignored(content: object, tmp_path: Path) -> None:
    assert read_provenance(write_evaluation(tmp_path, content)) == Provenance()


def test_a_missing_file_is_empty_and_an_unreadable_one_is_remarked(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) == Provenance()
    path = tmp_path / EVALUATION_FILE
    path.write_text("{")
    assert read_provenance(tmp_path).remarks == [
        f"{path}: cannot be read; commands and versions of its episodes are unknown."
    ]


def test_merged_provenance_has_each_command_once_and_a_reference_only_if_all_agree() -> None:
    other = Provenance(commands=["a command", "another"], reference="none", search_gflops=2.0)
    merged = merge_provenance([FULL, other])
    assert merged.commands == ["a command", "another"]
    assert (merged.reference, merged.search_gflops) == (None, 2.0)
    assert merge_provenance([FULL, Provenance()]).to_dict() == FULL.to_dict()
