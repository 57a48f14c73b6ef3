"""Evaluations on hosts with different slots."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper.config import build, build_environment, compose_config
from esper.controllers import NoGrowth, calibrate_rates, keeps_every_seed
from esper.controllers.random_controller import _simulate_counts
from esper.environment import EpisodeStart
from esper.evaluation.arm_context import ArmContext
from esper.evaluation.arm_jobs import _derived_variant, replay_jobs
from esper.evaluation.plans import schedule_plans, static_plans
from esper.evaluation.run import evaluate
from esper.growth import load_grown
from esper.lifecycle import Rules
from esper.records import EpisodeRecord
from tests.evaluation.fixtures_episodes import TASK, evaluated, load_episodes, make_episode, trained
from tests.evaluation.test_budget_arms import BUDGET
from tests.evaluation.test_plans import entry
from tests.fixtures_environment import config, environment
from tests.lifecycle.fixtures_slots import space

pytestmark = pytest.mark.xdist_group("slot_counts")

TWO = (
    "host=cifar_mixed", "host.hosts.cifar_baseline.blocks=1", "host.hosts.cifar_baseline.pools=1",
    "host.hosts.cifar_baseline.pool_slots=true",
)  # fmt: skip
SLOTS = {"cifar_blind": ["block1", "block2", "block3"], "cifar_baseline": ["block1", "pool1"]}
EXISTS = torch.tensor([[True, False, True, True], [True, True, False, False]])  # block1, pool1, block2, block3


def check_slots(episodes: list[EpisodeRecord]) -> None:
    for episode in episodes:
        own = SLOTS[str(episode.host)]
        assert episode.slots == own, episode.arm
        assert set(episode.fossils) <= set(own), episode.arm
        assert all(len(step.stage) == len(step.contribution) == len(own) for step in episode.steps), episode.arm
        if episode.arm in ("full", "all_seeds", "placebo"):
            assert list(episode.fossils) == own, episode.arm


def test_a_controller_is_trained_and_every_arm_runs_on_hosts_with_different_slots(tmp_path: Path) -> None:
    few = (*TWO, "environment.steps=5")
    run = trained(tmp_path / "run", *few)
    check_slots(load_episodes(run / "episodes.jsonl"))
    directory = tmp_path / "evaluation"
    evaluated(directory, *few, "controllers=all", f"ckpt={run}", "episodes=4", "schedules=4", "export=best")
    episodes = load_episodes(directory / "episodes.jsonl")
    check_slots(episodes)
    for arm in {episode.arm for episode in episodes}:
        assert [episode.host for episode in episodes if episode.arm == arm].count("cifar_blind") == 2, arm
    final = {(e.episode_seed, *e.fossils) for e in episodes if e.arm == "static_final"}
    assert final == {(e.episode_seed, *e.fossils) for e in episodes if e.arm == "ppo"}
    report = (directory / "report.md").read_text()
    assert "hosts have unequal numbers of episodes" not in report
    network = load_grown(next(directory.glob("grown_*.pt")))
    assert network(torch.zeros(2, 3, 8, 8)).shape == (2, 10)


def test_searches_under_a_budget_run_on_hosts_with_different_slots(tmp_path: Path) -> None:
    own = [override for override in BUDGET if not override.startswith("host=")]
    overrides = [*own, *TWO, "controllers=[none,full,best_static,best_open_loop,grow_once,net2net,gated]"]
    composed = compose_config("evaluate", [*overrides, "episodes=2", "search.budgets=[1,2]"])
    evaluate(composed, tmp_path, Console(quiet=True), "a command")
    check_slots(load_episodes(tmp_path / "episodes.jsonl"))
    searched = load_episodes(tmp_path / "search.jsonl")
    assert searched
    assert all(episode.slots == SLOTS[str(episode.host)] for episode in searched)


def test_a_schedule_is_valid_if_each_host_keeps_the_seeds_of_its_own_slots() -> None:
    four, rules = space("core", 4), build(config("lifecycle=quick").lifecycle)
    columns = [entry(7, slot, "norm") for slot in four.slots]
    assert not keeps_every_seed(four, rules, 10, columns), "one host cannot germinate four seeds in time"
    assert not keeps_every_seed(four, rules, 10, columns, EXISTS), "nor three"
    halves = torch.tensor([[True, True, False, False], [False, False, True, True]])
    assert keeps_every_seed(four, rules, 10, columns, halves)
    assert keeps_every_seed(four, rules, 10, columns[:2], EXISTS)


def test_candidates_are_plans_for_all_slots_of_all_hosts() -> None:
    env = environment(*TWO, "slots.blueprints=[depthwise,norm]")
    rules: Rules = build(config("lifecycle=quick").lifecycle)
    exists = env.host_pool.exists_by_host()
    assert torch.equal(exists, EXISTS)
    static = list(static_plans(env.space, [], "norm", 0, EpisodeStart()))
    assert len(static) == 3**4
    for plan in islice(schedule_plans(env.space, rules, 10, "norm", 0, EpisodeStart(), exists), 20):
        assert keeps_every_seed(env.space, rules, 10, plan.schedule, exists)


def test_static_candidates_of_very_many_slots_are_drawn() -> None:
    many = space("core", 40)  # 4^40 assignments are more than a random number of 63 bits
    plans = list(islice(static_plans(many, [], "norm", 0, EpisodeStart()), 20))
    assert len({plan.digest for plan in plans}) == 20


def test_rates_are_calibrated_on_the_slots_of_the_hosts() -> None:
    env = environment(*TWO)
    wanted = {"WAIT": 7.5, "GERMINATE": 2.0, "PRUNE": 0.5}
    rates = calibrate_rates(env.space, env.rules, 10, wanted, EXISTS)
    by_op = torch.tensor([rates.get(op.name, 0.0) for op in env.space.ops])
    counts = _simulate_counts(env.space, env.rules, 10, by_op, EXISTS)
    expected = torch.tensor([wanted.get(op.name, 0.0) for op in env.space.ops])
    assert torch.allclose(counts, expected, atol=0.2)
    assert rates != calibrate_rates(env.space, env.rules, 10, wanted)


def test_replay_exchanges_actions_between_episodes_with_the_same_host() -> None:
    env = build_environment(compose_config("evaluate", [*TASK, *TWO]))
    episode_seeds = [env.episode_seed("evaluation", 0, index) for index in range(5)]
    names = [env.host_pool.host_name(episode_seed) for episode_seed in episode_seeds]
    reference = [
        make_episode("ppo", episode_seed, slots=SLOTS[name], host=name, variant=str(index), inputs_digest=str(index))
        for index, (episode_seed, name) in enumerate(zip(episode_seeds, names, strict=True))
    ]
    context = ArmContext(env, episode_seeds, build_rule=NoGrowth, settings=str, reference=reference)
    partners = {job.episode_seeds[0]: job.variant for job in replay_jobs(context)}
    by_variant = {_derived_variant(episode): episode for episode in reference}
    for episode in reference:
        partner = by_variant[partners[episode.episode_seed]]
        assert partner.host == episode.host
        assert partner.episode_seed != episode.episode_seed
