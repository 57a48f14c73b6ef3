"""The table and the picture of a growth."""

import io
from typing import Any

from rich.console import Console

from esper.grow.report import growth_picture, growth_scalars, growth_table, seed_courses


def seed(planted: int, stage: str = "HOLDING", **values: Any) -> dict[str, Any]:
    return {"blueprint": "mlp", "planted": planted, "stage": stage, "alpha": 1.0, "parameters": 10, **values}


def record(step: int, seeds: dict[str, Any], **contribution: float) -> dict[str, Any]:
    known = {"step": step, "seeds": seeds, "contribution": contribution, "score": 1.0 * step, "parameters": 100}
    return known | {"flops": 5.0, "progress": 0.5}


HISTORY = [
    record(1, {}),
    record(2, {"a": seed(1)}, a=0.5),
    record(3, {"a": seed(1), "b": seed(2)}),
    record(4, {"b": seed(2)}, b=-1.0),
    record(5, {"a": seed(4), "b": seed(2)}),
]
KEPT = {"slot": "b", "contribution": -1.0, **seed(2, "FOSSILIZED")}


def test_every_seed_that_grew_has_its_course() -> None:
    courses = seed_courses(HISTORY, [KEPT])
    assert [(each.slot, each.planted, each.stage, each.removed, each.contribution) for each in courses] == [
        ("a", 1, "PRUNED", 4, 0.5),
        ("b", 2, "FOSSILIZED", None, -1.0),
        ("a", 4, "PRUNED", 5, None),
    ]


def test_a_seed_of_the_last_step_has_a_course_too() -> None:
    new = {"slot": "c", "contribution": None, **seed(5)}
    assert [each.slot for each in seed_courses(HISTORY, [KEPT, new])] == ["a", "b", "a", "c"]


def test_the_table_has_a_row_for_each_seed() -> None:
    out = io.StringIO()
    Console(file=out, width=120).print(growth_table(seed_courses(HISTORY, [KEPT]), 5, (100, 110)))
    rows = [line for line in out.getvalue().splitlines() if "mlp" in line]
    assert [row.split("│")[3].strip() for row in rows] == ["1 of 5, removed 4", "2 of 5", "4 of 5, removed 5"]
    assert "110 parameters, 1.10 times" in out.getvalue()


def test_the_picture_has_a_lane_for_each_slot_and_names_each_new_seed() -> None:
    curve, lanes = growth_picture(HISTORY, ["a", "b"]).axes
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["a", "b"]
    assert sorted(text.get_position() for text in lanes.texts) == [(0.6, 0), (1.6, 1), (3.6, 0)]
    assert list(curve.lines[0].get_ydata()) == [1, 2, 3, 4, 5]  # type: ignore[arg-type]


def test_loggers_get_finite_numbers_only() -> None:
    assert growth_scalars(HISTORY[1] | {"progress": float("nan")}) == {
        "grow/parameters": 100.0,
        "grow/seeds": 1.0,
        "grow/flops": 5.0,
        "grow/alpha/a": 1.0,
        "grow/contribution/a": 0.5,
    }
