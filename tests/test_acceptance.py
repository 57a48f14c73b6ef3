"""Every point of the reviews that esper starts from is shown by a test, removed by the design, or on its way."""

import ast
import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent
ENTRIES: dict[str, dict[str, str]] = tomllib.loads((PROJECT / "tests" / "acceptance.toml").read_text())
ANSWERS = {"test", "design", "issue"}
ISSUES = {"claims", "scale"}  # pieces of work that are still to come
COUNTS = {"D0": 31, "D1": 29, "D2": 18, "D3": 18, "D4": 60}  # ids of each review
PATTERN = re.compile(r"D0-([A-Z]+-\d+|R\d|T\d|CK)|D1-([HMLA]\d|GAE-\d|UPD-\d)|D2-\d+|D3-(\d\.\d|K)|D4-[CHMTK]\d+")


@cache
def functions(path: Path) -> frozenset[str]:
    """The tests that a file has."""
    return frozenset(node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef))


def faults(entry: dict[str, str], project: Path = PROJECT) -> list[str]:
    """What is wrong with an entry."""
    found = []
    for key in ("finding", "behaviour"):
        if not entry.get(key, "").strip():
            found.append(f"has no {key}")
    answers = sorted(ANSWERS & entry.keys())
    if len(answers) != 1:
        found.append(f"must have one of {', '.join(sorted(ANSWERS))}, not {len(answers)}")
    unknown = entry.keys() - ANSWERS - {"finding", "behaviour"}
    if unknown:
        found.append(f"has the unknown keys {', '.join(sorted(unknown))}")
    if "test" in entry:
        path, _, name = entry["test"].partition("::")
        file = project / path
        if not file.is_file():
            found.append(f"names the file {path}, which is not there")
        elif not name.startswith("test_") or name not in functions(file):
            found.append(f"names {name}, which {path} does not have")
    if "design" in entry and not entry["design"].strip().endswith("."):
        found.append("must say in a sentence why the point cannot arise")
    if "issue" in entry and entry["issue"] not in ISSUES:
        found.append(f"waits for {entry['issue']}, which is none of {', '.join(sorted(ISSUES))}")
    return found


def test_a_point_is_shown_by_a_test_removed_by_the_design_or_on_its_way() -> None:
    assert {point: found for point, entry in ENTRIES.items() if (found := faults(entry))} == {}


def test_ids_are_those_of_the_reviews_and_none_is_left_out() -> None:
    assert [point for point in ENTRIES if not PATTERN.fullmatch(point)] == []
    assert Counter(point[:2] for point in ENTRIES) == COUNTS


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"finding": None}, "has no finding"),
        ({"behaviour": " "}, "has no behaviour"),
        ({"design": "It cannot arise."}, "must have one of design, issue, test, not 2"),
        ({"test": None}, "must have one of design, issue, test, not 0"),
        ({"test": "tests/test_nothing.py::test_it"}, "names the file tests/test_nothing.py, which is not there"),
        ({"test": "tests/test_acceptance.py::test_no_such"}, "names test_no_such, which tests/test_acceptance.py does"),
        ({"test": "tests/test_acceptance.py::faults"}, "names faults, which tests/test_acceptance.py does not have"),
        ({"test": "tests/test_acceptance.py"}, "names , which tests/test_acceptance.py does not have"),
        ({"test": None, "issue": "someday"}, "waits for someday, which is none of claims, scale"),
        ({"test": None, "design": ""}, "must say in a sentence why the point cannot arise"),
        ({"reason": "none"}, "has the unknown keys reason"),
    ],
)
def test_an_entry_that_shows_nothing_is_found_out(change: dict[str, str | None], sentence: str) -> None:
    good = {
        "finding": "ids were lost",
        "behaviour": "ids are complete",
        "test": f"tests/{Path(__file__).name}::{test_ids_are_those_of_the_reviews_and_none_is_left_out.__name__}",
    }
    assert faults(good) == []
    changed = {key: value for key, value in {**good, **change}.items() if value is not None}
    assert len(faults(changed)) == 1
    assert sentence in faults(changed)[0]
