"""All arms without a checkpoint in a small evaluation under a budget of FLOPs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from esper.checkpoints.resume import save_config
from esper.config import build_environment, compose_config
from esper.evaluation.arms import ARMS, arms_of_clock
from esper.evaluation.run import evaluate
from esper.growth import load_grown
from esper.records import EpisodeRecord
from esper.rng import derive_seed
from esper.training import train
from tests.evaluation.fixtures_episodes import load_episodes
from tests.fixtures_environment import SMALL

pytestmark = pytest.mark.xdist_group("budget_arms")  # share one evaluation

UNUSED = ("environment.batches", "lifecycle.", "environment.steps")
BUDGET = (
    *(override for override in SMALL if not override.startswith(UNUSED)),
    "host=cifar_blind", "environment=budget", "lifecycle=quick", "reward=score", "environment.budget_batches=48",
    "environment.steps=4", "environment.envs=4", "environment.validation_samples=20",
    "slots.blueprints=[depthwise,norm]", "search.cache=null",
)  # fmt: skip
EPISODES = 2
EpisodesByArm = dict[str, list[EpisodeRecord]]


def evaluated(directory: Path, *overrides: str) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    config = compose_config("evaluate", [*BUDGET, f"episodes={EPISODES}", *overrides])
    return evaluate(config, directory, Console(quiet=True), "a command")


def load_by_arm(directory: Path) -> EpisodesByArm:
    episodes: EpisodesByArm = {}
    for episode in load_episodes(directory / "episodes.jsonl"):
        episodes.setdefault(episode.arm, []).append(episode)
    return episodes


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("budget")
    evaluated(directory, "controllers=rules", "search.budgets=[1,2]")
    return directory


@pytest.fixture(scope="module")
def by_arm(evaluation: Path) -> EpisodesByArm:
    return load_by_arm(evaluation)


@pytest.fixture(scope="module")
def report(evaluation: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((evaluation / "evaluation.json").read_text())
    return content


def test_rules_are_all_arms_that_need_no_checkpoint(by_arm: EpisodesByArm) -> None:
    rules = {name for name, arm in arms_of_clock(True).items() if arm.needs != "ckpt"}
    assert set(by_arm) == {*rules, "best_static@1"} - {"best_fixed", "oracle"}, "a single task has no training tasks"
    assert {"all_seeds", "static_final_flops", "host_flops"}.isdisjoint(rules)
    seeds = {arm: sorted(episode.episode_seed for episode in episodes) for arm, episodes in by_arm.items()}
    assert len(set(map(tuple, seeds.values()))) == 1


def test_every_arm_spends_the_budget_and_at_most_one_batch_more(by_arm: EpisodesByArm) -> None:
    env = build_environment(compose_config("evaluate", BUDGET))
    for episodes in by_arm.values():
        for episode in episodes:
            budget = env.budget_flops(episode.episode_seed)
            assert 0.8 * budget < episode.flops < 1.5 * budget


def test_arms_that_look_at_nothing_pay_for_no_measurement(by_arm: EpisodesByArm) -> None:
    observing = ("gated", "tuned_rule", "heuristic", "fragrow")
    for arm, episodes in by_arm.items():
        for episode in episodes:
            measured = episode.flops_by_part["validation"] + episode.flops_by_part["probes"]
            assert (measured > 0) == (arm in observing), arm
            assert [step.loss is None for step in episode.steps[:-1]].count(False) == (3 if arm in observing else 0)
            assert episode.validation_score is not None


def test_a_gate_that_requires_a_contribution_makes_every_arm_measure(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[schedule]", "reference=schedule", "lifecycle.gates.holding.contribution=-100")
    for episode in load_by_arm(tmp_path)["schedule"]:
        assert episode.flops_by_part["probes"] > 0


def test_static_arms_fill_their_slots_at_the_start_and_grow_once_at_its_moment(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[full,placebo,grow_once@0,grow_once@0.5,net2net@0.5]")
    by_arm = load_by_arm(tmp_path)
    for arm in ("full", "grow_once@0", "grow_once@0.5"):
        for episode in by_arm[arm]:
            assert episode.fossils == dict.fromkeys(episode.slots, ("depthwise", "ADD"))
            grown_from = next(n for n, step in enumerate(episode.steps) if step.stage == ["FOSSILIZED"] * 3)
            assert grown_from == (2 if arm == "grow_once@0.5" else 0)
    assert [e.score for e in by_arm["full"]] == [e.score for e in by_arm["grow_once@0"]]
    assert all(episode.fossils == {} for episode in by_arm["net2net@0.5"])
    sizes = {arm: episodes[0].parameters for arm, episodes in by_arm.items()}
    assert sizes["placebo"] == sizes["full"]
    assert sizes["net2net@0.5"] > 3 * 3_482


def test_arms_with_equal_plans_share_their_episodes(by_arm: EpisodesByArm, evaluation: Path) -> None:
    by_digest: dict[tuple[str, int], list[EpisodeRecord]] = {}
    for episode in (episode for episodes in by_arm.values() for episode in episodes):
        if episode.inputs_digest.startswith("plan "):
            by_digest.setdefault((episode.inputs_digest, episode.episode_seed), []).append(episode)
    assert any(len(episodes) > 1 for episodes in by_digest.values()), "best_static and its prefix, or lr x 1"
    for first, *others in by_digest.values():
        assert all(replace(other, arm=first.arm) == first for other in others)


def test_searches_use_episode_seeds_of_their_own_and_the_validation_split(
    by_arm: EpisodesByArm, evaluation: Path
) -> None:
    tried = load_episodes(evaluation / "search.jsonl")
    used = {episode.episode_seed for episode in tried}
    assert used == {derive_seed("search", 0, number) for number in range(5)}
    assert used.isdisjoint(episode.episode_seed for episode in by_arm["none"])
    assert all(episode.split == "validation" and episode.test_score is None for episode in tried)
    assert len({(episode.arm, episode.episode_seed) for episode in tried}) == len(tried)


def test_the_cost_of_each_search_is_reported(report: dict[str, Any], evaluation: Path) -> None:
    searches = report["searches"]
    assert set(searches) == {"best_static", "best_static_lr", "none_lr", "full_lr", "grow_once", "net2net",
                             "best_open_loop"}  # fmt: skip
    budget = build_environment(compose_config("evaluate", BUDGET)).budget_flops(0) / 1e9
    assert searches["best_static"]["prefixes"]["1"]["gflops"] == pytest.approx(budget, rel=0.5)
    assert searches["best_static"]["gflops"] > searches["best_static"]["prefixes"]["1"]["gflops"]
    assert searches["best_static_lr"]["gflops"] > searches["best_static"]["gflops"]
    assert searches["grow_once"]["episodes"] == 5 + 4
    text = (evaluation / "report.md").read_text()
    assert "Searches and regret" in text
    assert "| best_static@1 |" in text


def test_the_oracle_is_the_best_plan_and_regret_is_relative_to_it(report: dict[str, Any], evaluation: Path) -> None:
    oracle = report["oracle"]
    assert oracle in ("none", "full", "best_static", "best_open_loop", "grow_once", "net2net")
    assert f"regret: {oracle} - arm" in (evaluation / "report.md").read_text()


def test_a_search_is_read_from_the_cache_by_another_evaluation_of_the_task(tmp_path: Path) -> None:
    arms = ("controllers=[grow_once]", "search.lr_scales=null")
    evaluated(tmp_path / "a", *arms, f"search.cache={tmp_path}/cache")
    (path,) = (tmp_path / "cache").iterdir()
    content = path.read_text()
    evaluated(tmp_path / "b", *arms, f"search.cache={tmp_path}/cache", "seed=1")
    assert path.read_text() == content, "the search does not depend on the seed of the evaluation"
    evaluated(tmp_path / "c", *arms, f"search.cache={tmp_path}/cache", "environment.budget_batches=40")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    first, second = (load_by_arm(tmp_path / name)["grow_once"] for name in "ab")
    assert first[0].episode_seed != second[0].episode_seed
    assert first[0].inputs_digest == second[0].inputs_digest


def test_an_interrupted_search_continues(tmp_path: Path) -> None:
    evaluated(tmp_path / "whole", "controllers=[grow_once]")
    lines = (tmp_path / "whole/search.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/search.jsonl").write_text("".join(lines[:3]))
    evaluated(tmp_path / "cut", "controllers=[grow_once]")
    finished = (tmp_path / "cut/search.jsonl").read_text().splitlines(keepends=True)
    assert finished[:3] == lines[:3]
    assert len(finished) == len(lines)
    scores = [[e.score for e in load_by_arm(tmp_path / name)["grow_once"]] for name in ("whole", "cut")]
    assert scores[0] == scores[1]


def test_gated_keeps_what_contributes(by_arm: EpisodesByArm) -> None:
    for episode in by_arm["gated"]:
        assert [step.action["op"] for step in episode.steps[:3]] == ["GERMINATE"] * 3
        assert {blueprint for blueprint, _ in episode.fossils.values()} <= {"depthwise"}
        assert len(episode.fossils) + episode.pruned <= 3


def test_static_final_has_the_network_that_the_reference_ended_with(by_arm: EpisodesByArm) -> None:
    ended = {episode.episode_seed: episode.fossils for episode in by_arm["gated"]}
    assert {episode.episode_seed: episode.fossils for episode in by_arm["static_final"]} == ended


def test_a_network_that_was_widened_is_exported_with_its_width(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[net2net@0.5]", "reference=net2net@0.5", "export=best")
    network = load_grown(next(tmp_path.glob("grown_*.pt")))
    best = max(load_by_arm(tmp_path)["net2net@0.5"], key=lambda episode: episode.selection_score or 0.0)
    assert sum(parameter.numel() for parameter in network.parameters()) == best.parameters
    data = build_environment(compose_config("evaluate", BUDGET)).host_pool.task(0).data
    with torch.no_grad():
        hits = [(network(x).argmax(-1) == y).sum().item() for x, y in data.batches("test", 50)]
    assert 100 * sum(hits) / data.size("test") == pytest.approx(best.test_score)


def test_the_network_that_a_widened_reference_ended_with_is_wide_from_the_start(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[static_final]", "reference=net2net", "search.budgets=[1]")
    by_arm = load_by_arm(tmp_path)
    assert by_arm["static_final"][0].parameters == by_arm["net2net"][0].parameters
    assert by_arm["static_final"][0].steps[0].parameters == by_arm["net2net"][0].parameters


def test_policies_are_charged_for_their_own_passes(tmp_path: Path) -> None:
    checkpoint = trained(tmp_path / "run")
    evaluated(tmp_path / "out", "controllers=[ppo,ppo_permuted,ppo_blind,ppo_shuffled,replay]", f"ckpt={checkpoint}")
    by_arm = load_by_arm(tmp_path / "out")
    assert set(by_arm) == {"ppo", "ppo_permuted", "ppo_blind", "ppo_shuffled", "replay"}
    budget = build_environment(compose_config("evaluate", BUDGET)).budget_flops(0)
    for arm, episodes in by_arm.items():
        for episode in episodes:
            assert (episode.flops_by_part["controller"] > 0) == (arm != "replay")
            assert episode.flops == pytest.approx(sum(episode.flops_by_part.values()))
            assert episode.flops < 1.5 * budget


def trained(directory: Path) -> Path:
    """Train for one round; returns the run's directory."""
    own = [override for override in BUDGET if not override.startswith("search.")]
    overrides = [*own, "policy.hidden=16", "ppo.epochs=1", "collector.warmup=1", "validate_every=0", "rounds=1"]
    config = compose_config("run", overrides)
    (directory / ".hydra").mkdir(parents=True)
    save_config(config, directory, overrides)
    train(config, directory, Console(quiet=True))
    return directory


def test_every_arm_has_a_description() -> None:
    assert all(arm.description for arm in ARMS.values())
