from typing import Any

from esper.evaluation.amortised import amortised
from esper.evaluation.document import Table, Text
from esper.evaluation.results import sort
from tests.evaluation.kit import line


def arm(name: str, score: float, gflops: float, learner: str | None = None) -> list[dict[str, Any]]:
    return [line(name, seed, score + seed % 3, learner=learner, flops=gflops * 1e9) for seed in range(8)]


LINES = [
    *arm("ppo", 40.0, 5.0, learner="a"),
    *arm("fragrow", 40.0, 9.0),  # as good, and dearer
    *arm("static_final", 40.0, 9.0, learner="a"),  # not to be had without the controller
    *arm("placebo", 20.0, 9.0),
    *arm("none", 30.0, 1.0),  # worse, and cheaper
    *arm("all_seeds", 45.0, 7.0),  # better
    *arm("best_open_loop", 39.0, 4.0),
]


def test_training_is_paid_back_where_a_use_saves_flops_and_loses_no_score() -> None:
    (task,), _ = sort(LINES)
    words, table = amortised(task, "ppo", {"a": {"gflops": 1_001.0}}, searched=250.0)
    assert isinstance(table, Table)
    assert {row[0].removeprefix("ppo - "): row[2:] for row in table.rows} == {
        "fragrow": ["+4.0 [+4.0, +4.0]", "251"],
        "none": ["-4.0 [-4.0, -4.0]", "never: it does not cost less"],
        "all_seeds": ["+2.0 [+2.0, +2.0]", "never: it scores less"],
        "best_open_loop": ["-1.0 [-1.0, -1.0]", "never: it does not cost less"],
    }
    assert isinstance(words, Text)
    assert "took 1,001 GFLOPs" in words.words
    assert "is paid back by 5 of them" in words.words


def test_nothing_is_said_where_no_controller_was_trained_or_its_cost_is_not_known() -> None:
    (task,), _ = sort(LINES)
    assert not amortised(task, "none", {}, None)
    assert not amortised(task, "ppo", {"a": {"gflops": None}}, None)
    assert not amortised(task, "ppo", {}, None)
