"""What a policy is cloned from, and runs that start from it."""

from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper import training
from esper.config import build_distribution, build_vector_env, compose_config
from esper.environment.oracle_tasks import SPLITS
from esper.ppo import LAST, clone_plans, listed_gains, oracle_gains, read_checkpoint
from esper.ppo.teachers import TaskGains, choose_teachers, choose_trials
from esper.tasks import LEAST_GAIN, FixedPlan, KnownTask, PlanScore, TaskList, task_digest
from esper.training import build_module, plan_gains, train

ORACLE = ["+experiment=oracle_tasks", "logger=none", "callbacks.dashboard=null", "environment.envs=8", "ppo=many_tasks"]
QUICK = ["rounds=1", "validate_every=0", "policy.hidden=8"]
DIAGNOSIS = [
    "+experiment=quickstart", "tasks=diagnosis", "tasks.repeats=1", "actions=lean", "lifecycle=quick",
    "environment=budget", "environment.batches=null", "environment.envs=4", "environment.steps=6",
    "environment.budget=0.5", "environment.workers=0", "start=plans", "data.train=200", "data.validation=20",
    "data.test=20",
]  # fmt: skip
CLONING = ["ppo.cloning_rounds=2", "ppo.cloning_passes=3"]


def everywhere(blueprint: str, at: float = 0.0) -> FixedPlan:
    return FixedPlan((("all", blueprint),), at)


GAINS: TaskGains = {
    0: {everywhere("norm"): 3.0, everywhere("norm", 0.5): 4.0, everywhere("attention"): -1.0},
    1: {everywhere("norm"): 2.0, everywhere("attention"): 6.0},
    2: {everywhere("norm"): -1.0, everywhere("attention"): -2.0},
    3: {everywhere("norm"): 1.0, everywhere("attention"): 1.1},
}


def test_trials_are_the_plans_that_win_most_together_and_begin_at_once() -> None:
    assert choose_trials(GAINS, 3) == [everywhere("attention"), everywhere("norm")]
    assert choose_trials(GAINS, 1) == [everywhere("attention")]


def test_trials_end_at_the_first_plan_that_gains_almost_as_much_as_the_best() -> None:
    teachers = choose_teachers(GAINS, 3)
    attention, norm, nothing = everywhere("attention"), everywhere("norm"), FixedPlan()
    assert {number: each[0].plans for number, each in teachers.items()} == {
        0: (attention, norm),
        1: (attention,),
        2: (attention, norm, nothing),
        3: (attention,),
    }
    mean = (4.0 + 6.0 + 1.1) / 3
    weights = [each[0].weight for each in teachers.values()]
    assert weights == pytest.approx([4.0 / mean, 6.0 / mean, 1.0, 1.0]), "at least 1"


def test_trials_together_have_each_blueprint_in_a_slot_and_then_the_best_plan() -> None:
    teachers = choose_teachers(GAINS, 3, together=True)
    attention, norm = everywhere("attention"), everywhere("norm")
    trials = {each[0].plans[0] for each in teachers.values()}
    assert [each[0].plans[1] for each in teachers.values()] == [norm, attention, FixedPlan(), attention]
    assert len(trials) == 1, "the same in every task: what is best is not known before it"
    assert trials.pop().by_slot(["block1", "block2", "block3"]) == {"block3": "attention", "block1": "norm"}
    assert teachers[0][0].plans[0].by_slot(["block1"]) == {"block1": "attention"}, "the one that gains most"
    mean = (4.0 + 6.0 + 1.1) / 3
    assert [each[0].weight for each in teachers.values()] == pytest.approx([4.0 / mean, 6.0 / mean, 1.0, 1.0])


def test_without_trials_the_best_plans_of_a_task_are_demonstrated_and_waiting_where_none_wins() -> None:
    teachers = choose_teachers(GAINS, 0)
    attention, norm = everywhere("attention"), everywhere("norm")
    assert {number: [plan.plans for plan in each] for number, each in teachers.items()} == {
        0: [(everywhere("norm", 0.5),)],
        1: [(attention,)],
        2: [(FixedPlan(),)],
        3: [(norm,), (attention,)],
    }
    assert choose_teachers({0: {norm: LEAST_GAIN - 0.1}}, 0)[0][0].plans == (FixedPlan(),)


def test_gains_of_listed_plans_are_over_no_growth_and_need_known_blueprints() -> None:
    plans = (PlanScore(everywhere("norm"), 45.0, 4), PlanScore(everywhere("lora"), 50.0, 4))
    task = KnownTask("train00_a", "a", "train", "0", (40.0, 42.0), plans)
    assert listed_gains({5: task}, ["norm", "attention"]) == {5: {everywhere("norm"): 4.0}}


def test_the_oracle_knows_what_plans_gain_on_its_training_tasks() -> None:
    gains = oracle_gains(build_vector_env(compose_config("run", ORACLE)))
    assert list(gains) == list(SPLITS["train"])
    best = torch.tensor([max(plans.values()) for plans in gains.values()])
    assert 0.1 < (best <= 0.5).float().mean() < 0.4, "a quarter of the tasks gains nothing"
    assert best.mean() > 5


def test_a_run_from_plans_has_their_cost_and_a_resumed_run_does_not_clone_again(tmp_path: Path) -> None:
    overrides = [*ORACLE, *QUICK, *CLONING]
    train(compose_config("run", overrides), tmp_path, Console(quiet=True))
    first = read_checkpoint(tmp_path / "checkpoints" / LAST).metadata
    assert first.start_cost["episodes"] == 16
    assert first.start_cost["decisions"] == 16 * 20
    assert first.start_cost["gflops"] > 0
    console = Console(record=True, quiet=False)
    train(compose_config("run", [*overrides, "rounds=2"]), tmp_path, console, resumed=overrides)
    second = read_checkpoint(tmp_path / "checkpoints" / LAST).metadata
    assert second.counters.rounds == 2
    assert second.start_cost == first.start_cost, "the seconds would differ"


def test_a_cloned_policy_acts_as_its_teachers_on_unseen_tasks(tmp_path: Path) -> None:
    overrides = [
        *ORACLE,
        *QUICK,
        "environment.envs=32",
        "ppo=many_tasks",
        "policy.hidden=32",
        "ppo.cloning_rounds=4",
        "ppo.cloning_passes=12",
    ]
    metrics = train(compose_config("run", overrides), tmp_path, Console(quiet=True))
    assert metrics["validation/greedy_score"] > 51, "no growth has 47, chance less"


def test_plans_of_listed_tasks_are_cloned_and_their_flops_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config("run", [*DIAGNOSIS, *CLONING, "ppo.cloning_rounds=1", "ppo.cloning_patience=1"])
    distribution = build_distribution(config)
    assert distribution is not None
    gain = (PlanScore(everywhere("norm", 0.25), 30.0, 1), PlanScore(everywhere("depthwise"), 15.0, 1))
    known = [
        KnownTask(spec.name, spec.family, spec.split, task_digest(spec), (20.0,), gain)
        for spec in distribution.specs("train")[:3]
    ]
    monkeypatch.setattr(TaskList, "load", lambda name: TaskList(name, known, {}))
    env = build_vector_env(config)
    try:
        module = build_module(config, env)
        gains = plan_gains(config, env)
        assert list(gains) == [0, 1, 2]
        assert gains[0] == {everywhere("norm", 0.25): 10.0, everywhere("depthwise"): -5.0}
        cost = clone_plans(module.policy, env, gains, module.settings, 0)
    finally:
        env.close()
    assert cost["episodes"] == 3, "a task that is not listed is left out"
    assert cost["gflops"] is not None
    assert cost["gflops"] > 3 * env.budget_flops(env.episode_seed("cloning", 0, 0)) / 1e9 / 2


def test_the_search_for_plans_is_part_of_the_cost_of_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose_config("run", [*DIAGNOSIS, *CLONING])
    search = {"train": {"episodes": 100, "gflops": 4000.0, "seconds": 500.0}, "test": {"episodes": 7}}
    known = KnownTask("train00_a", "a", "train", "0", (40.0,), ())
    monkeypatch.setattr(TaskList, "load", lambda name: TaskList(name, [known], {}, search))
    own = {"episodes": 8, "decisions": 48, "gflops": 4.0, "seconds": None}
    monkeypatch.setattr(training, "clone_plans", lambda *arguments: own)
    monkeypatch.setattr(training, "plan_gains", lambda *arguments: GAINS)
    env = build_vector_env(config)
    try:
        cost = training.clone_known_plans(config, env, build_module(config, env))
    finally:
        env.close()
    assert cost == {"episodes": 108, "decisions": 48, "gflops": 4004.0, "seconds": None}


def test_a_list_without_scores_has_no_plans() -> None:
    assert listed_gains({0: KnownTask("train00_a", "a", "train", "0", (), ())}, ["norm"]) == {}


def test_without_known_plans_there_is_one_sentence(tmp_path: Path) -> None:
    config = compose_config("run", ["+experiment=quickstart", "start=plans", "logger=none"])
    with pytest.raises(ValueError, match="needs known plans of the training tasks, but tasks=single has none"):
        train(config, tmp_path, Console(quiet=True))
