"""The same comparison with several budgets."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from esper.config import compose_config
from esper.evaluation.frontier import frontier_costs, frontier_table, plot_costs
from esper.evaluation.results import TaskResults, group_by_task
from esper.evaluation.run import budget_configs, evaluate
from tests.evaluation.fixtures_episodes import load_episodes, make_episodes
from tests.evaluation.test_budget_arms import BUDGET
from tests.evaluation.test_evaluate import error_of, run_command
from tests.fixtures_environment import SMALL


def task(**scores: float) -> TaskResults:
    episodes = [episode for arm, score in scores.items() for episode in make_episodes(arm, [score, score + 1])]
    return group_by_task(episodes)[0][0]


def test_the_table_has_a_column_for_each_budget_and_the_best_arm_first() -> None:
    costs = frontier_costs({10.0: task(none=10, full=5), 20.0: task(none=11, full=20), 5.0: task(none=3)})
    table = frontier_table(costs, [5.0, 10.0, 20.0])
    assert table.header == ("arm", "5 GFLOPs", "10 GFLOPs", "20 GFLOPs")
    assert [row[0] for row in table.rows] == ["full", "none"]
    assert table.rows[0][1] == "-"
    assert table.rows[0][3].startswith("20.50 [")


def test_arms_of_a_budget_are_side_by_side() -> None:
    costs = frontier_costs({10.0: task(none=10, full=5), 20.0: task(none=11, full=20)})
    axes = plot_costs(costs, "GFLOPs", "GFLOPs", "a task").axes[0]
    first, second = ([float(x) for x in container.lines[0].get_xdata()] for container in axes.containers)
    assert all(a < b for a, b in zip(first, second, strict=True))
    assert [text.get_text() for text in axes.get_xticklabels()] == ["10", "20"]


def test_each_budget_is_an_evaluation_and_all_are_compared(tmp_path: Path) -> None:
    command = [*BUDGET, "controllers=[none,grow_once@0.5]", "episodes=2", "environment.budget_batches=null"]
    run_command(tmp_path, *command, "budgets=[0.1,0.05]", "hydra.run.dir=out")
    spent = {}
    for name in ("budget_0.05", "budget_0.1"):
        episodes = load_episodes(tmp_path / "out" / name / "episodes.jsonl")
        assert len(episodes) == 4
        assert (tmp_path / "out" / name / "report.md").exists()
        spent[name] = sum(episode.flops for episode in episodes)
    assert spent["budget_0.1"] == pytest.approx(2 * spent["budget_0.05"], rel=0.1)
    (arms,) = json.loads((tmp_path / "out/frontier.json").read_text()).values()
    assert set(arms) == {"none", "grow_once@0.5"}
    assert set(arms["none"]) == {"0.05", "0.1"}
    assert set(arms["none"]["0.1"]) == {"score", "GFLOPs", "seconds", "parameters"}
    for name in ("frontier", "frontier_seconds", "frontier_parameters"):
        assert (tmp_path / f"out/{name}.png").exists()
        assert f"pictures/{name}.png" in (tmp_path / "out/report.md").read_text()

    before = (tmp_path / "out/budget_0.1/episodes.jsonl").read_text()
    run_command(tmp_path, "resume=out", "budgets=[0.05,0.1,0.2]")
    assert (tmp_path / "out/budget_0.1/episodes.jsonl").read_text() == before
    (arms,) = json.loads((tmp_path / "out/frontier.json").read_text()).values()
    assert set(arms["none"]) == {"0.05", "0.1", "0.2"}
    sentence = error_of(tmp_path, *command, "budgets=[0.1]", "hydra.run.dir=out")
    assert "must be a directory without an evaluation; resume=out continues it." in sentence


def test_the_latest_evaluation_may_be_one_with_several_budgets(tmp_path: Path) -> None:
    command = [*BUDGET, "controllers=[none]", "episodes=1"]
    run_command(tmp_path, *command, "budgets=[0.1]", "environment.budget_batches=null")
    run_command(tmp_path, "resume=latest", "episodes=2")
    (records,) = (tmp_path / "outputs/evaluate").glob("*/budget_0.1/episodes.jsonl")
    assert len(load_episodes(records)) == 2


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((*SMALL, "budgets=[45]"), r"^budgets=\[45\]: must be null with a number of batches; environment=budget has"),
        ((*BUDGET, "budgets=[]"), r"^budgets=\[\]: must be different numbers of GFLOPs above 0, such as"),
        ((*BUDGET, "budgets=[45,-1]"), r"^budgets=\[45, -1\]: must be different numbers of GFLOPs above 0"),
        ((*BUDGET, "budgets=[45,45]"), r"^budgets=\[45, 45\]: must be different numbers of GFLOPs above 0"),
    ],
)
def test_budgets_that_cannot_be_compared_are_refused(overrides: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        evaluate(compose_config("evaluate", overrides), tmp_path, Console(quiet=True))


def test_a_budget_replaces_that_of_the_environment() -> None:
    configs = budget_configs(compose_config("evaluate", [*BUDGET, "budgets=[2,1]"]))
    assert list(configs) == [1.0, 2.0]
    assert configs[2.0].environment.budget == 2.0
    assert configs[2.0].environment.budget_batches is None
    assert configs[2.0].budgets is None
