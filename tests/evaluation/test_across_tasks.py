"""Arms over many tasks, with made-up episodes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from esper.evaluation.across_tasks import (
    best_rule,
    check_harm,
    group_by_split,
    regrets_by_family,
    summarise_arms,
    tasks_without_use,
)
from esper.evaluation.claims import compare_arms
from esper.evaluation.output import write_results
from esper.evaluation.per_controller import controllers_over_tasks
from esper.evaluation.provenance import Provenance, merge_provenance
from esper.evaluation.regret import search_table, searches_of_task, task_search_table
from esper.evaluation.results import TaskResults, group_by_task
from esper.evaluation.statistics import estimate
from esper.evaluation.task_sections import group_tables, plot_regrets
from esper.records import EpisodeRecord
from tests.evaluation.fixtures_episodes import make_episodes

CONFIG = {"tasks": {"_target_": "esper.tasks.TaskDistribution"}, "data": {}}
FAMILIES = ("narrow", "no_space")


def episodes_of(
    arm: str, gains: Sequence[float], *, split: str = "test", checkpoint: str | None = None, noise: float = 0.0
) -> list[EpisodeRecord]:
    """Eight episodes on each task; `gains` are the arm's by task, and the host alone scores 30, 31, ..."""
    rng = np.random.default_rng(len(arm))
    return [
        episode
        for number, gain in enumerate(gains)
        for episode in make_episodes(
            arm, list(30.0 + number + np.arange(8) / 10 + gain + noise * rng.normal(size=8)), config=CONFIG,
            host=f"{split}{number:02d}_{FAMILIES[number % 2]}", checkpoint=checkpoint,
        )
    ]  # fmt: skip


def tasks_of(*episodes: list[EpisodeRecord]) -> list[TaskResults]:
    return group_by_task([each for own in episodes for each in own])[0]


def test_tasks_of_training_families_and_of_held_out_ones_are_separate_groups() -> None:
    groups = group_by_split(tasks_of(episodes_of("none", [0] * 3), episodes_of("none", [0] * 2, split="heldout")))
    assert {title: len(own) for title, own in groups.items()} == {
        "unseen tasks of the training families": 3, "families that training never has": 2,
    }  # fmt: skip
    assert {task.family for own in groups.values() for task in own} == set(FAMILIES)
    alone = group_by_task(make_episodes("none", [1.0]))[0]
    assert list(group_by_split(alone)) == ["all tasks"]
    assert alone[0].family is None


def test_an_arm_has_its_gain_regret_and_failures_over_tasks() -> None:
    gains = [1.0, 3.0] * 4
    tasks = tasks_of(
        episodes_of("none", [0.0] * 8), episodes_of("full", gains), episodes_of("oracle", [3.0] * 8),
        episodes_of("bad", [-5.0] + [0.0] * 7),
    )  # fmt: skip
    found = {one.arm: one for one in summarise_arms(tasks, "oracle")}
    full = found["full"]
    assert full.gain is not None
    assert full.regret is not None
    assert (full.gain.value, full.regret.value) == pytest.approx((2.0, 1.0))
    assert full.middle_gain == pytest.approx(2.0)
    assert full.worst_gain == pytest.approx(1.0)
    assert full.normalised == pytest.approx(1 / 3)
    assert full.normalised_tasks == 8
    assert full.gain.low < 2.0 < full.gain.high, "the interval is over tasks"
    assert found["bad"].failure_rate == pytest.approx(1 / 8)
    assert found["none"].gain is not None
    assert found["none"].gain.value == 0
    assert [one.arm for one in summarise_arms(tasks, "oracle")] == ["oracle", "full", "none", "bad"]


def test_regret_by_family_is_the_mean_over_the_tasks_of_a_family() -> None:
    tasks = tasks_of(
        episodes_of("none", [0.0] * 4), episodes_of("full", [1.0, 2.0, 2.0, 2.0]), episodes_of("oracle", [2.0] * 4)
    )
    found = regrets_by_family(tasks, "oracle")
    assert list(found) == ["oracle", "full", "none"], "the lowest regret first"
    assert found["full"] == pytest.approx({"narrow": 0.5, "no_space": 0.0})
    assert found["none"] == pytest.approx({"narrow": 2.0, "no_space": 2.0})
    assert regrets_by_family(tasks, None) == {}
    (axes,) = plot_regrets(found).axes
    assert [text.get_text() for text in axes.texts] == ["0.0", "0.0", "0.5", "0.0", "2.0", "2.0"]


def test_harm_is_measured_where_growth_cannot_help() -> None:
    tasks = tasks_of(
        episodes_of("none", [0.0] * 8), episodes_of("ppo", [-0.2] * 7 + [9.0], checkpoint="/a"),
        episodes_of("full", [-1.0] * 8),
    )  # fmt: skip
    gains = {str(task.host): 0.29 for task in tasks[:-1]} | {str(tasks[-1].host): 0.31}
    assert len(tasks_without_use(tasks, gains)) == 7
    found = {check.arm: check for check in check_harm(tasks, gains)}
    assert found["ppo"].difference.value == pytest.approx(-0.2), "without the task where growth helps"
    assert found["ppo"].verdict == "yes, and its interval"
    assert found["full"].verdict == "no"
    assert check_harm(tasks, {}) == [], "it was not measured"


def test_a_few_controllers_on_many_tasks_are_compared_over_tasks_and_seeds() -> None:
    """Three controllers whose gains differ by 1: a claim is of these, not of others from the same training."""
    ppo = [each for number in range(3) for each in episodes_of("ppo", [number + 0.5] * 8, checkpoint=f"/{number}")]
    tasks = tasks_of(episodes_of("none", [0.0] * 8, noise=0.1), ppo)
    (one,) = compare_arms(tasks, "ppo", "none")
    assert one.gap.value == pytest.approx(1.5, abs=0.2)
    assert one.gap.excludes_zero
    assert one.over_controllers is not None
    assert not one.over_controllers.excludes_zero, "three controllers as a sample"
    assert one.claim == "better, of these controllers"
    assert one.is_primary
    table = controllers_over_tasks(tasks, "ppo", "none")
    assert table is not None
    assert table.header == ("controller", "tasks", "score", "- none")
    assert [round(float(row[3].split()[0]), 1) for row in table.rows] == [0.5, 1.5, 2.5]
    (single,) = compare_arms(tasks[:1], "ppo")
    assert single.over_controllers is None, "a single task has intervals over controllers, as before"
    six = [each for number in range(6) for each in episodes_of("ppo", [number / 2 + 0.1] * 8, checkpoint=f"/{number}")]
    (many,) = compare_arms(tasks_of(episodes_of("none", [0.0] * 8, noise=0.1), six), "ppo")
    assert many.over_controllers is None
    assert many.claim == "better"


@pytest.mark.parametrize("effect", [0.0, 2.0])
def test_few_controllers_are_rarely_claimed_to_differ_without_a_difference(effect: float) -> None:
    """Tasks and episodes differ at random; the controllers are fixed, with a mean gain of `effect`."""
    claims, repeats = 0, 120
    for number in range(repeats):
        rng = np.random.default_rng(number)
        by_task = rng.normal(0, 1, 20)
        strata = [effect + gain + np.array([[-0.3], [0.0], [0.3]]) + rng.normal(0, 1, (3, 8)) for gain in by_task]
        claims += estimate(strata, fixed_controllers=True).p_value < 0.05
    assert claims / repeats <= 0.1 if effect == 0 else claims / repeats >= 0.95


def test_the_best_rule_is_chosen_by_validation_score_among_rules_that_carry_over() -> None:
    tasks = tasks_of(
        episodes_of("none", [0.0] * 4, split="train"), episodes_of("gated", [1.0] * 4, split="train"),
        episodes_of("best_static", [3.0] * 4, split="train"), episodes_of("full", [5.0], split="train"),
        episodes_of("oracle", [4.0] * 4, split="train"),
    )  # fmt: skip
    best = best_rule(summarise_arms(tasks, "oracle"))
    assert best is not None
    assert best.arm == "gated", "best_static searches each task, and full did not run on all"


SEARCHES = {
    "grow_once": {"plan": "norm at 0.25", "score": 40.0, "gflops": 90.0, "episodes": 30, "training_tasks": 12},
    "best_static": {
        "tasks": {
            f"test0{number}_{family}": {
                "plan": f"plan {number}", "score": 30.0 + number, "gflops": 10.0, "episodes": 12,
                "prefixes": {"1": {"plan": "short", "score": 20.0, "gflops": 1.0, "episodes": 4}},
            }
            for number, family in enumerate(FAMILIES)
        }
    },
}  # fmt: skip


def test_searches_of_tasks_have_a_summary_and_a_row_for_each_task() -> None:
    table = search_table(SEARCHES)
    assert table is not None
    assert table.rows == [
        ["grow_once", "norm at 0.25 (chosen on 12 training tasks)", "40.00", "90", "30"],
        ["best_static@1", "one for each of 2 tasks, 1.0 GFLOPs each", "20.00", "2", "8"],
        ["best_static", "one for each of 2 tasks, 10.0 GFLOPs each", "30.50", "20", "24"],
    ]
    by_task = task_search_table(SEARCHES)
    assert by_task is not None
    assert [row[:3] for row in by_task.rows] == [
        ["test00_narrow", "best_static@1", "short"], ["test00_narrow", "best_static", "plan 0"],
        ["test01_no_space", "best_static@1", "short"], ["test01_no_space", "best_static", "plan 1"],
    ]  # fmt: skip
    own = searches_of_task(SEARCHES, "test01_no_space")
    assert own["best_static"]["plan"] == "plan 1"
    assert list(own) == ["best_static"]


def test_reports_of_several_splits_are_merged_task_by_task() -> None:
    heldout = {"best_static": {"tasks": {"heldout00_waist": {"plan": "p", "score": 1.0, "gflops": 1.0, "episodes": 1}}}}
    sources = [
        Provenance(searches=SEARCHES, oracle="oracle", growth_gains={"a": 1.0}),
        Provenance(searches={**heldout, "grow_once": SEARCHES["grow_once"]}, oracle="oracle", growth_gains={"b": 0.0}),
    ]
    merged = merge_provenance(sources)
    assert merged.oracle == "oracle"
    assert merged.growth_gains == {"a": 1.0, "b": 0.0}
    assert len(merged.searches["best_static"]["tasks"]) == 3
    assert merged.searches["grow_once"] == SEARCHES["grow_once"]


def test_a_report_of_many_tasks_has_a_section_for_each_split(tmp_path: Path) -> None:
    arms = ("none", "oracle", "ppo")
    episodes = [
        each
        for split in ("test", "heldout")
        for arm, gain in zip(arms, (0.0, 2.0, 1.0), strict=True)
        for each in episodes_of(arm, [gain] * 8, split=split, checkpoint="/a" if arm == "ppo" else None, noise=0.1)
    ]
    gains = {str(episode.host): 0.0 for episode in episodes if episode.host == "heldout00_narrow"}
    provenance = Provenance(oracle="oracle", primary="none", growth_gains=gains)
    write_results(episodes, provenance, tmp_path, Console(quiet=True))
    text = (tmp_path / "report.md").read_text()
    for title in ("unseen tasks of the training families", "families that training never has"):
        assert f"## All tasks together: {title}" in text
    assert "Growth cannot help on 1 of 8 tasks" in text
    assert "![regret1](pictures/regret1.png)" in text
    across = json.loads((tmp_path / "evaluation.json").read_text())["across_tasks"]
    held_out = across["families that training never has"]
    assert held_out["growth_cannot_help"] == ["heldout00_narrow"]
    assert held_out["compared"]["none"]["is_primary"]
    assert list(held_out["compared"]) == ["none"], "the oracle is no rival"
    assert held_out["arms"]["ppo"]["regret"]["value"] == pytest.approx(1.0, abs=0.2)
    titles = [title for title, _ in group_tables(group_by_task(episodes)[0][:8], "ppo", provenance)]
    assert titles[:4] == ["arms", "differences to ppo", "cost", "regret by family"]
