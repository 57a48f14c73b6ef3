"""Searches on the tasks of a distribution: plans of each task, rules from the training tasks, and the oracle."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from esper.config import build_environment, compose_config, task_specs
from esper.environment import EpisodeStart
from esper.evaluation.arm_context import ArmContext
from esper.evaluation.plan_choices import known_plans, training_config
from esper.evaluation.plans import Plan
from esper.evaluation.run import evaluate
from esper.evaluation.selection import check_arms, selected_arms
from esper.records import EpisodeRecord
from esper.tasks import FixedPlan, KnownTask, PlanScore, TaskList, task_digest
from tests.environment.test_task_environment import ZOO
from tests.evaluation.fixtures_episodes import load_episodes

pytestmark = pytest.mark.xdist_group("task_searches")  # share one evaluation

TASKS = 2
SMALL_SEARCH = (
    *ZOO, "tasks=cifar_zoo", "tasks.split=test", f"tasks.counts.test={TASKS}", "tasks.counts.train=3",
    "tasks.repeats=1", "tasks.settings.budget_batches.log=[8,12]",
    "environment.envs=8", "environment.threads=1", "environment.steps=4", "environment.validation_samples=20",
    "slots.blueprints=[norm,depthwise]", "search.budgets=[1]", "search.finalist_seeds=2", "search.lr_scales=null",
    "search.episodes=20", "search.harm_seeds=1", "blueprint=[norm]", "net2net_host=wide2", f"episodes={2 * TASKS}",
)  # fmt: skip
ARMS = "controllers=[none,full,gated,best_static,grow_once,best_open_loop,net2net]"


def composed(*overrides: str) -> Any:
    return compose_config("evaluate", [*SMALL_SEARCH, *overrides])


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    config = composed(ARMS, f"search.cache={directory}/cache", "reference=gated")
    evaluate(config, directory, Console(quiet=True), "a command")
    return directory


@pytest.fixture(scope="module")
def report(evaluation: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((evaluation / "evaluation.json").read_text())
    return content


@pytest.fixture(scope="module")
def episodes(evaluation: Path) -> list[EpisodeRecord]:
    return load_episodes(evaluation / "episodes.jsonl")


def tasks_of(episodes: list[EpisodeRecord]) -> list[str]:
    return sorted({str(episode.host) for episode in episodes})


def test_each_task_has_a_search_for_the_best_static_network_of_its_own(
    report: dict[str, Any], episodes: list[EpisodeRecord]
) -> None:
    found = report["searches"]["best_static"]["tasks"]
    assert sorted(found) == tasks_of(episodes)
    assert len(found) == TASKS
    for own in found.values():
        assert own["episodes"] >= 10, "eight candidates for a sixteenth of the budget, two for a quarter"
        assert own["gflops"] > 0
    chosen = {(episode.host, episode.inputs_digest) for episode in episodes if episode.arm == "best_static"}
    assert len(chosen) == TASKS, "one plan for each task, on all its episode seeds"
    for host, fossils in {(e.host, tuple(e.fossils)) for e in episodes if e.arm == "best_static"}:
        slots = next(episode.slots for episode in episodes if episode.host == host)
        assert set(fossils) <= set(slots)


def test_searches_of_tasks_run_together(evaluation: Path) -> None:
    found = [load_episodes(path) for path in (evaluation / "cache").iterdir()]
    tried = next(episodes for episodes in found if any(str(e.host).startswith("test") for e in episodes))
    short = [str(episode.host) for episode in tried if "0.0625 of the budget" in episode.arm]
    first_halves = [short[:8].count(host) for host in tasks_of(tried)]
    assert len(short) == 8 * TASKS
    assert sum(a != b for a, b in pairwise(short)) >= 1
    assert short.index(tasks_of(tried)[1]) < 16
    assert sum(first_halves) == 8


def test_rules_are_chosen_on_training_tasks_within_their_episodes(
    report: dict[str, Any], evaluation: Path, episodes: list[EpisodeRecord]
) -> None:
    for arm in ("grow_once", "net2net", "best_open_loop"):
        outcome = report["searches"][arm]
        assert outcome["training_tasks"] == 3
        assert outcome["episodes"] <= 20
    found = [load_episodes(path) for path in (evaluation / "cache").iterdir()]
    on_training = next(own for own in found if all(str(e.host).startswith("train") for e in own))
    assert {episode.split for episode in on_training} == {"validation"}
    assert len(tasks_of(on_training)) == 3
    grown = [episode for episode in episodes if episode.arm == "grow_once"]
    assert all(set(episode.fossils) in (set(), set(episode.slots)) for episode in grown)


def test_the_oracle_of_a_task_is_the_best_of_all_plans_that_are_known_for_it(
    report: dict[str, Any], episodes: list[EpisodeRecord]
) -> None:
    assert report["oracle"] == "oracle"
    chosen = report["searches"]["oracle"]["tasks"]
    assert sorted(chosen) == tasks_of(episodes)
    origins = {own["plan"].partition(":")[0] for own in chosen.values()}
    assert origins <= {"none", "full", "best_static", "grow_once", "net2net", "best_open_loop"}
    for task, own in chosen.items():
        origin = own["plan"].partition(":")[0]
        by_arm = [
            sorted((e.episode_seed, e.score or 0) for e in episodes if e.host == task and e.arm == arm)
            for arm in (origin, "oracle")
        ]
        assert by_arm[0] == by_arm[1], "the same plan on the same episode seeds"


def test_whether_growth_can_help_is_measured_on_episode_seeds_that_no_table_uses(
    report: dict[str, Any], evaluation: Path, episodes: list[EpisodeRecord]
) -> None:
    assert sorted(report["growth_gains"]) == tasks_of(episodes)
    found = [each for path in (evaluation / "cache").iterdir() for each in load_episodes(path)]
    bare = f"{Plan(EpisodeStart(measured=False)).digest}, 1 of the budget"
    for task, gain in report["growth_gains"].items():
        gated = next(each for each in found if each.host == task and each.arm.startswith("gated, "))
        assert gated.episode_seed not in {each.episode_seed for each in episodes}
        same = {each.arm: each.selection_score or 0.0 for each in found if each.episode_seed == gated.episode_seed}
        assert gain >= same[gated.arm] - same[bare] - 1e-9
        assert any(gain == pytest.approx(score - same[bare]) for score in same.values())


def test_a_resumed_evaluation_repeats_no_search(evaluation: Path, report: dict[str, Any]) -> None:
    before = {path: path.read_text() for path in (evaluation / "cache").iterdir()}
    config = composed(ARMS, f"search.cache={evaluation}/cache", "reference=gated")
    evaluate(config, evaluation, Console(quiet=True), "again")
    assert {path: path.read_text() for path in (evaluation / "cache").iterdir()} == before
    again = json.loads((evaluation / "evaluation.json").read_text())
    assert again["searches"] == report["searches"]


def test_the_search_for_rules_does_not_depend_on_the_evaluated_split() -> None:
    configs = [training_config(composed(f"tasks.split={split}")) for split in ("test", "heldout")]
    assert configs[0].tasks == configs[1].tasks
    assert dict(configs[0].tasks.counts) == {"train": 3, "validation": 0, "test": 0, "heldout": 0}


def test_a_listed_plan_is_a_candidate_for_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("controllers=[none]")
    environment = build_environment(config)
    spec = next(iter(environment.host_pool.names))
    first = next(each for each in task_specs(config) if each.name == spec)
    good, bad = FixedPlan((("all", "norm"),), 0.25), FixedPlan((("last", "depthwise"),), 0.1)
    known = KnownTask(
        spec, first.family, "test", task_digest(first), (40.0,), (PlanScore(bad, 41.0, 2), PlanScore(good, 42.0, 2))
    )
    monkeypatch.setattr(TaskList, "load", lambda name: TaskList(name, [known], {}))
    context = ArmContext(environment, [0], lambda name: None, str)  # type: ignore[arg-type,return-value]
    plans = known_plans(config, context)
    slots = environment.host_pool.slots_of(spec)
    assert [(set(plan.start.fossils), plan.start.at) for plan in plans[spec]] == [(set(slots), 0.25)]
    assert sum(map(len, plans.values())) == 1
    environment.close()


def test_the_oracle_belongs_to_evaluations_of_a_distribution_with_searches() -> None:
    assert "oracle" in selected_arms(composed(ARMS))
    assert "oracle" not in selected_arms(composed("controllers=[none,full,grow_once]")), "no task is searched"
    assert "oracle" in selected_arms(composed("controllers=rules"))
    single = compose_config("evaluate", ["+experiment=cifar_ppo", "controllers=[none,oracle]"])
    with pytest.raises(ValueError, match=r"^controllers: oracle needs a task distribution; with tasks=single the"):
        check_arms(single)
    assert "oracle" not in selected_arms(compose_config("evaluate", ["+experiment=cifar_ppo", "controllers=rules"]))
    with pytest.raises(ValueError, match=r"^tasks\.counts\.train=0: must be at least 1 for the arm grow_once, a rule"):
        check_arms(composed("controllers=[grow_once]", "tasks.counts.train=0"))


def test_equal_plans_of_different_arms_have_equal_episodes(episodes: list[EpisodeRecord]) -> None:
    by_plan: dict[tuple[str, int], list[EpisodeRecord]] = {}
    for episode in episodes:
        if episode.inputs_digest.startswith("plan "):
            by_plan.setdefault((episode.inputs_digest, episode.episode_seed), []).append(episode)
    assert any(len(own) > 1 for own in by_plan.values()), "the oracle and the arm that has its plan"
    for first, *others in by_plan.values():
        assert all(replace(other, arm=first.arm, variant=first.variant) == first for other in others)
