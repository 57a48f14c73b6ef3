"""Tasks in an environment: each episode has the host, data, batch, learning rates and budget of its task."""

import math
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from esper.config import build_environment, check_config, compose_config
from esper.config.build import build_tasks, task_specs
from esper.data import DataError
from esper.environment import Environment
from esper.tasks import FixedPlan, KnownTask, PlanScore, TaskList, task_digest
from tests.fixtures_environment import SMALL
from tests.fixtures_environment import environment as environment_of_hosts

ZOO = (
    *(override for override in SMALL if "batches" not in override),
    "+experiment=zoo_ppo", "data.train=400", "environment.workers=0", "tasks.counts.train=6", "tasks.repeats=2",
    "tasks.counts.validation=3", "tasks.host.pools=1", "tasks.settings.budget_batches.log=[20,40]",
    "tasks.settings.batch.choice=[8,16]",
    "tasks.variants=[{classes: 3}, {colour: grey}, {train: 200}]",
)  # fmt: skip


def zoo(*overrides: str, command: str = "evaluate") -> DictConfig:
    return compose_config(command, [*ZOO, "tasks.split=train", *overrides])


def build_zoo(*overrides: str, **changes: Any) -> Environment:
    config = zoo(*overrides)
    check_config(config)
    return build_environment(config, **changes)


def run(environment: Environment, episode_seeds: list[int], steps: int | None = None) -> dict[str, torch.Tensor]:
    """The outcome of episodes in which every slot is filled with the first blueprint at once."""
    environment.reset(episode_seeds, steps=steps)
    ops = [op.name for op in environment.space.ops]
    grow = torch.tensor([[ops.index("GERMINATE"), len(environment.space.slots), 0]]).expand(len(episode_seeds), -1)
    wait = torch.zeros_like(grow)
    for step in range(environment.view.steps):
        environment.step(grow if step == 0 else wait)
    return environment.outcome()


@pytest.fixture(scope="module")
def environment() -> Environment:
    return build_zoo("environment.envs=6")


def test_each_episode_has_the_budget_data_and_chance_level_of_its_task(environment: Environment) -> None:
    pool = environment.host_pool
    episode_seeds = pool.episode_seeds("evaluation", 0, 0)
    tasks = [pool.task(episode_seed) for episode_seed in episode_seeds]
    assert len({task.data.name for task in tasks}) > 2
    assert len({task.batch for task in tasks}) == 2
    environment.reset(episode_seeds)
    clock = environment.view.clock
    assert clock is not None
    torch.testing.assert_close(clock.chance_loss, torch.tensor([math.log(task.data.options) for task in tasks]))
    passes = [task.budget_batches * task.batch / task.data.size("train") for task in tasks]  # type: ignore[operator]
    torch.testing.assert_close(clock.passes, torch.tensor(passes))
    outcome = run(environment, episode_seeds)
    for env, (episode_seed, task) in enumerate(zip(episode_seeds, tasks, strict=True)):
        budget = environment.budget_flops(episode_seed)
        bare = float(pool.costs(episode_seed).train({}, {}) * task.batch)
        assert budget == bare * task.budget_batches  # type: ignore[operator]
        assert budget <= outcome["gflops"][env] * 1e9 * 1.001 < 3 * budget


def test_an_episode_of_a_task_does_not_depend_on_its_neighbours_or_on_worker_processes(
    environment: Environment,
) -> None:
    episode_seeds = environment.host_pool.episode_seeds("evaluation", 1, 0)
    together = run(environment, episode_seeds)["score"]
    alone = torch.cat([run(environment, [episode_seed])["score"] for episode_seed in episode_seeds[:2]])
    assert torch.equal(together[:2], alone)
    with_workers = build_zoo("environment.envs=6", "environment.workers=2")
    try:
        assert torch.equal(run(with_workers, episode_seeds)["score"], together)
    finally:
        with_workers.close()


def test_rounds_of_other_numbers_of_steps_spend_the_same_budget_in_workers_too(environment: Environment) -> None:
    episode_seeds = environment.host_pool.episode_seeds("evaluation", 2, 0)[:2]
    environment.reset(episode_seeds, steps=3)
    wait = torch.zeros(2, len(environment.space.heads), dtype=torch.int64)
    results = [environment.step(wait) for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"^the episode has ended"):
        environment.step(wait)
    assert [result.record.steps for result in results] == [3, 3, 3]
    assert [bool(result.terminated.all()) for result in results] == [False, False, True]
    clock = environment.view.clock
    assert clock is not None
    budgets = torch.tensor([environment.budget_flops(episode_seed) for episode_seed in episode_seeds])
    assert (clock.spent == 1).all()
    assert (environment.outcome()["gflops"] * 1e9 < 1.2 * budgets).all(), "at most a batch above the budget"
    few = run(environment, episode_seeds, 3)
    with_workers = build_zoo("environment.envs=6", "environment.workers=2", "tasks.steps=[3,6]")
    try:
        assert with_workers.round_steps == (3, 6)
        assert torch.equal(run(with_workers, episode_seeds, 3)["score"], few["score"])
    finally:
        with_workers.close()


def test_a_critic_gets_finite_descriptors_of_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [spec for spec in task_specs(zoo()) if spec.split == "train"]
    known = KnownTask("", "", "", task_digest(specs[1]), (20.0, 30.0), (PlanScore(FixedPlan(), 35.0, 1),))
    monkeypatch.setattr(TaskList, "load", lambda name: TaskList(name, [known], {}))
    environment = build_zoo("environment.envs=6")
    episode_seeds = environment.host_pool.episode_seeds("evaluation", 0, 0)
    names, values = environment.task_features, environment.describe_tasks(episode_seeds)
    assert values.shape == (6, len(names))
    assert values.isfinite().all()
    assert values.abs().max() <= 3, "batches of 8"
    by_name = dict(zip(names, values.T.tolist(), strict=True))
    families = [name for name in names if name.startswith("family=")]
    for env, spec in enumerate(specs):
        assert [name for name in families if by_name[name][env]] == [f"family={spec.family}"]
        assert by_name["lr_scale"][env] == pytest.approx(math.log2(spec.lr_scale))
        assert by_name["budget"][env] == pytest.approx(math.log10(spec.budget_batches / 1000))  # type: ignore[operator]
    assert by_name["none"] == pytest.approx([0, 0.25, 0, 0, 0, 0])
    assert by_name["none_known"] == by_name["best_gain_known"] == [0, 1, 0, 0, 0, 0]
    assert by_name["best_gain"] == pytest.approx([0, 0.5, 0, 0, 0, 0])


def test_hosts_without_families_have_no_descriptors_of_tasks() -> None:
    mixed = environment_of_hosts("host=cifar_slots")
    assert mixed.task_features == ()
    assert mixed.describe_tasks([1, 2]).shape == (2, 0)


def test_scores_that_were_measured_with_other_settings_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = task_specs(zoo())
    known = [KnownTask("", "", "", task_digest(spec), (20.0,), ()) for spec in specs]
    for settings, overrides, is_known in (
        ({}, [], True),
        ({"data.resolution": 8, "environment.steps": 20}, [], True),
        ({"data.resolution": 16}, [], False),
        ({}, ["environment.budget_share=0.5"], False),
    ):
        monkeypatch.setattr(TaskList, "load", lambda name, settings=settings: TaskList(name, known, settings))
        tasks = build_tasks(zoo(*overrides))
        assert [task.known is not None for task in tasks.values()] == [is_known] * len(specs)


def test_a_training_run_draws_training_and_validation_tasks() -> None:
    environment = build_environment(zoo("environment.envs=4", command="run"))
    pool = environment.host_pool
    seeds = [environment.episode_seed("training", 0, index) for index in range(4)]
    names = [pool.host_name(episode_seed) for episode_seed in seeds]
    assert names[0] == names[1] != names[2] == names[3], "two episodes of each task"
    assert all(name.startswith("train") for name in names)
    assert pool.host_name(environment.episode_seed("validation", 0, 0)).startswith("validation")
    assert environment.task_number(seeds[0]) == environment.task_number(seeds[1])


def test_bad_tasks_are_refused_in_one_sentence() -> None:
    for override, message in (
        ("tasks.settings.budget_batches=0.5", "tasks: the budget of train0"),
        ("tasks.variants=[{colour: blue}]", "blue"),
        ("tasks.steps=[10,0]", "tasks.steps=[10, 0]: must be different numbers of at least 1, or null."),
        ("tasks.settings.batch=500", "environment.batch=500: must be between 1 and the"),
    ):
        with pytest.raises((ValueError, DataError)) as error:
            build_zoo("environment.envs=6", override)
        assert message in str(error.value)
    with pytest.raises(ValueError, match=r"tasks.repeats=4: must divide environment.envs=6\."):
        build_environment(zoo("environment.envs=6", "tasks.repeats=4", command="run"))
