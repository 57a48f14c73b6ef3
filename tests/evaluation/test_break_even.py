from typing import Any

from esper.evaluation.break_even import break_even
from esper.evaluation.document import Paragraph, ReportTable
from esper.evaluation.results import group_by_task
from tests.evaluation.fixtures_episodes import line


def arm(name: str, score: float, gflops: float, checkpoint: str | None = None) -> list[EpisodeRecord]:
    return [line(name, seed, score + seed % 3, checkpoint=checkpoint, flops=gflops * 1e9) for seed in range(8)]


LINES = [
    *arm("ppo", 40.0, 5.0, checkpoint="a"),
    *arm("fragrow", 40.0, 9.0),  # as good, and dearer
    *arm("static_final", 40.0, 9.0, checkpoint="a"),  # not to be had without the controller
    *arm("placebo", 20.0, 9.0),
    *arm("none", 30.0, 1.0),  # worse, and cheaper
    *arm("all_seeds", 45.0, 7.0),  # better
    *arm("best_open_loop", 39.0, 4.0),
]


def test_training_is_paid_back_where_a_use_saves_flops_and_loses_no_score() -> None:
    (task,), _ = group_by_task(LINES)
    words, table = break_even(task, "ppo", {"a": {"gflops": 1_001.0}}, search_gflops=250.0)
    assert isinstance(table, ReportTable)
    assert {row[0].removeprefix("ppo - "): row[2:] for row in table.rows} == {
        "fragrow": ["+4.0 [+4.0, +4.0]", "251"],
        "none": ["-4.0 [-4.0, -4.0]", "never: it does not cost less"],
        "all_seeds": ["+2.0 [+2.0, +2.0]", "never: it scores less"],
        "best_open_loop": ["-1.0 [-1.0, -1.0]", "never: it does not cost less"],
    }
    assert isinstance(words, Paragraph)
    assert "took 1,001 GFLOPs" in words.words
    assert "is paid back by 5 of them" in words.words


def test_nothing_is_said_where_no_controller_was_trained_or_its_cost_is_not_known() -> None:
    (task,), _ = group_by_task(LINES)
    assert not break_even(task, "none", {}, None)
    assert not break_even(task, "ppo", {"a": {"gflops": None}}, None)
    assert not break_even(task, "ppo", {}, None)
