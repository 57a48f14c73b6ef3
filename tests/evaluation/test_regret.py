"""Regret against the best plan of a task, and the tables of searches and learning rates."""

from collections.abc import Sequence

import pytest

from esper.evaluation.provenance import Provenance
from esper.evaluation.regret import lr_table, regret_table, regrets, search_blocks, search_table
from esper.evaluation.results import TaskResults, group_by_task
from tests.evaluation.fixtures_episodes import make_episodes


def task(**scores: Sequence[float]) -> TaskResults:
    episodes = [episode for arm, values in scores.items() for episode in make_episodes(arm, values)]
    return group_by_task(episodes)[0][0]


NONE, GAIN = [10.0, 11.0, 12.0, 13.0], [2.0, 2.1, 1.9, 2.0]
BEST = [a + b for a, b in zip(NONE, GAIN, strict=True)]


def test_regret_is_the_paired_difference_from_the_oracle() -> None:
    found = regrets(task(none=NONE, full=BEST, grow_once=[11.0, 12.0, 13.0, 14.0]), "full")
    assert list(found) == ["full", "grow_once", "none"]
    assert found["full"].points.value == 0
    assert found["none"].points.value == pytest.approx(2.0)
    assert found["none"].normalised == pytest.approx(1.0)
    assert found["grow_once"].normalised == pytest.approx(0.5)


def test_regret_is_normalised_only_where_the_oracle_is_clearly_above_the_bare_host() -> None:
    noisy = [a + b for a, b in zip(NONE, [6.0, -2.0, 5.0, -1.0], strict=True)]
    assert all(regret.normalised is None for regret in regrets(task(none=NONE, full=noisy), "full").values())
    assert regrets(task(none=NONE, full=BEST), "none")["full"].normalised is None
    assert regrets(task(full=BEST), "full")["full"].normalised is None


def test_without_an_oracle_there_is_no_regret() -> None:
    assert regrets(task(none=NONE), None) == {}
    assert regret_table(task(none=NONE), "full") is None
    assert search_table({}) is None
    assert search_blocks(task(none=NONE), Provenance()) == []


def test_each_search_and_each_of_its_prefixes_has_a_row_with_its_cost() -> None:
    outcome = {"plan": "norm in block1", "score": 50.0, "gflops": 1234.5, "episodes": 20}
    short = {**outcome, "gflops": 100.0, "score": None}
    table = search_table({"best_static": {**outcome, "prefixes": {"1": short}}})
    assert table is not None
    assert table.rows == [
        ["best_static@1", "norm in block1", "-", "100", "20"],
        ["best_static", "norm in block1", "50.00", "1,234", "20"],
    ]


def test_arms_with_their_own_learning_rate_are_beside_those_with_the_common_one() -> None:
    table = lr_table([task(none=NONE, none_lr=BEST, full=NONE)])
    assert table is not None
    ((arm, common, own, gap),) = table.rows
    assert arm == "none"
    assert common.startswith("11.50 [")
    assert own.startswith("13.50 [")
    assert gap.startswith("+2.00 [")
    assert lr_table([task(none=NONE)]) is None
    assert table in search_blocks(task(none=NONE, none_lr=BEST, full=NONE), Provenance())
