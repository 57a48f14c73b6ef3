"""Headroom: how much the best plan of each task gains over the best plan for all tasks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from esper.config import compose_config, known_tasks, task_specs
from esper.evaluation import task_report
from esper.evaluation.episode_store import EpisodeStore
from esper.evaluation.headroom import HeadroomStudy, TaskHeadroom
from esper.evaluation.run import budget_configs, evaluate
from esper.evaluation.selection import check_arms, selected_arms
from esper.tasks import FixedPlan, KnownTask, PlanScore, TaskList, TaskSpec, task_digest
from esper.tasks.__main__ import main
from tests.environment.test_task_environment import ZOO, build_zoo, zoo
from tests.evaluation.fixtures_episodes import load_episodes
from tests.test_gym import SMALL_ZOO

SPEC = TaskSpec("train00_narrow", "narrow", "train", {"channels": 4}, "data", {}, 1.0, 32, 300.0)
NORM, BOTH = FixedPlan((("all", "norm"),), 0.1), FixedPlan((("front", "norm"), ("back", "depthwise")), 0.1)


def headroom(none: float, fixed: float, best: float, plan: FixedPlan = BOTH) -> TaskHeadroom:
    return TaskHeadroom(SPEC, none, fixed, best, plan, NORM, (none, none + 1), 2)


def test_growth_cannot_help_where_the_best_plan_does_not_gain() -> None:
    rows = [headroom(40.0, 39.0, best) for best in (40.2, 41.0)]
    assert [row.can_profit for row in rows] == [False, True]
    assert [round(row.headroom, 1) for row in rows] == [1.2, 2.0]


def test_a_list_has_the_best_plan_and_the_best_fixed_plan_of_a_task() -> None:
    known = headroom(40.0, 41.0, 42.0).to_known()
    assert known.digest == task_digest(SPEC)
    assert known.none == (40.0, 41.0)
    assert {each.plan: each.score for each in known.plans} == {BOTH: 42.0, NORM: 41.0}
    assert [each.plan for each in headroom(40.0, 41.0, 41.0, NORM).to_known().plans] == [NORM]


def test_a_study_counts_fresh_episodes_only_and_continues_from_its_file(tmp_path: Path) -> None:
    overrides = ("environment.envs=8", "tasks.counts.train=3", "environment.steps=3")
    overrides += ("slots.blueprints=[norm,attention]", "tasks.settings.budget_batches=6")
    environment = build_zoo(*overrides)
    specs = task_specs(zoo(*overrides))[:2]
    path = tmp_path / "episodes.jsonl"
    steps: list[int] = []

    def study() -> list[TaskHeadroom]:
        store = EpisodeStore(path)
        return HeadroomStudy(environment, specs, store, lambda: steps.append(1)).run(refine=True, finalists=1, fresh=1)

    results = study()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["host"] for line in lines} == {result.spec.name for result in results} == {s.name for s in specs}
    for result in results:
        own = [line for line in lines if line["host"] == result.spec.name]
        seeds = list(dict.fromkeys(line["episode_seed"] for line in own))
        assert len(seeds) == 3, "one for all plans, one for finalists, one that counts"
        last = {line["arm"]: line["selection_score"] for line in own if line["episode_seed"] == seeds[-1]}
        assert last == {"none": result.none, result.fixed_plan.name: result.fixed, result.plan.name: result.best}
        assert len(result.none_scores) == 3
    assert len({result.fixed_plan for result in results}) == 1
    done = len(steps)
    assert study() == results
    assert len(steps) == done, "finished episodes do not run again"


def test_the_command_writes_tasks_that_were_not_measured_and_keeps_scores_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TaskListHere(TaskList):
        def write(self, directory: Path = tmp_path) -> Path:
            return super().write(directory)

        @classmethod
        def load(cls, name: str, directory: Path = tmp_path) -> TaskList:
            return super().load(name, directory)

    monkeypatch.setattr(task_report, "TaskList", TaskListHere)
    overrides = [override for override in ZOO if "experiment" not in override and "tasks.counts" not in override]
    main(["cifar_zoo", "--split", "test", "--count", "2", "--write", *overrides])
    first = TaskListHere.load("cifar_zoo").tasks
    assert [task.name[:6] for task in first] == ["test00", "test01"]
    assert [task.scores for task in first] == [None, None]
    measured = replace(first[1], none=(40.0, 41.0))
    main(["cifar_zoo", "--count", "1", "--write", *overrides])
    trained = next(task for task in TaskListHere.load("cifar_zoo").tasks if task.split == "train")
    changed = replace(trained, name="train01_changed", digest="0")
    TaskListHere("cifar_zoo", [trained, changed, measured], {}).write()
    main(["cifar_zoo", "--split", "test", "--count", "2", "--write", *overrides])
    assert TaskListHere.load("cifar_zoo").tasks == (trained, first[0], measured), "without tasks that have changed"
    main(["cifar_zoo", "--split", "test", "--count", "1", "--write", *overrides])
    listed = TaskListHere.load("cifar_zoo")
    assert {task.name for task in listed.tasks} == {trained.name, measured.name, first[0].name}, (
        "others of the split stay"
    )
    with pytest.raises(SystemExit) as error:
        main(["cifar_zoo", "--split", "test", "--count", "1", "--write", *overrides, "environment.steps=7"])
    steps = listed.settings["environment.steps"]
    assert str(error.value).startswith(f"environment.steps=7: must be {steps} to write into the list of cifar_zoo, ")


def test_the_list_of_a_text_distribution_has_settings_of_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    composed = task_report.compose_tasks("stories_zoo", "train", None, ["data=synthetic_stories"])
    settings = task_report.listed_settings(composed)
    assert {"data._target_", "data.vocabulary", "optimizer.build.lr"} <= set(settings)
    assert "data.resolution" not in settings


def test_tasks_with_budgets_of_their_own_refuse_other_budgets() -> None:
    with pytest.raises(ValueError, match=r"^budgets=\[5, 500\]: must be null with tasks=cifar_zoo, whose tasks have"):
        budget_configs(compose_config("evaluate", ["+experiment=zoo_ppo", *SMALL_ZOO, "budgets=[5,500]"]))


def test_a_list_that_was_measured_with_other_settings_is_not_known() -> None:
    config = compose_config("evaluate", ["+experiment=diagnosis_ppo"])
    assert len(known_tasks(config).tasks) == 4
    for change in (
        "environment.budget=1",
        "optimizer.build.lr=0.5",
        "data=synthetic_images",
        "environment.budget_share=0.5",
    ):
        changed = compose_config("evaluate", ["+experiment=diagnosis_ppo", change])
        assert known_tasks(changed).tasks == (), change
    assert len(known_tasks(changed, any_share=True).tasks) == 4, "the last change is a share of the budget"


def test_the_command_lists_tasks_and_refuses_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [override for override in ZOO if "experiment" not in override and "tasks.counts" not in override]
    main(["cifar_zoo", "--split", "validation", "--count", "2", *overrides])
    printed = capsys.readouterr().out
    assert "validation00_" in printed
    assert "mean of 2" in printed
    for arguments, message in (
        (["zoo"], "zoo: is not a task distribution; there are cifar_zoo, diagnosis, stories_zoo."),
        (["diagnosis", "--headroom", "--count", "9"], "--count 9: must be between 1 and 4, the number of train tasks."),
        (["diagnosis", "--headroom", "--plans", "every"], "--plans every: must be one of screened, refined."),
        (["diagnosis", "--headroom", "--fresh", "0"], "--fresh 0: must be at least 1."),
    ):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert str(error.value) == message


def test_the_arm_best_fixed_is_the_plan_that_is_best_on_average_over_the_training_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = ({NORM: 41.0, BOTH: 45.0}, {BOTH: 30.0, NORM: 36.0, FixedPlan(): 50.0})
    known = [
        KnownTask(
            f"train0{number}", "a", "train", str(number), (40.0,), tuple(PlanScore(*pair, 2) for pair in own.items())
        )
        for number, own in enumerate(scores)
    ]
    tasks = TaskList("cifar_zoo", known, {})
    assert tasks.fixed_plan == NORM, "38.5 on average, and the other one 37.5"
    small = [override for override in SMALL_ZOO if "validation=0" not in override]
    overrides = [*small, "+experiment=zoo_ppo", "tasks=cifar_zoo", "controllers=[none,best_fixed]", "episodes=2"]
    overrides += ["environment.envs=4", "environment.workers=0", "environment.threads=1"]
    monkeypatch.setattr(TaskList, "load", lambda name: TaskList(name, (), {}))
    with pytest.raises(
        ValueError, match="best_fixed needs known plans of training tasks, but tasks=cifar_zoo has none"
    ):
        check_arms(compose_config("evaluate", overrides))
    assert "best_fixed" not in selected_arms(compose_config("evaluate", [*overrides, "controllers=rules"]))
    monkeypatch.setattr(TaskList, "load", lambda name: tasks)
    evaluate(compose_config("evaluate", overrides), tmp_path, Console(quiet=True))
    grown = [episode for episode in load_episodes(tmp_path / "episodes.jsonl") if episode.arm == "best_fixed"]
    assert len(grown) == 2
    for episode in grown:
        assert {name for name, _ in episode.fossils.values()} == {"norm"}
        assert set(episode.fossils) == set(episode.slots)
        assert episode.flops_by_part["probes"] == 0
