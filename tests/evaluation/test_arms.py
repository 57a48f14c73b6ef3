"""All arms in a small evaluation, with a controller that was trained briefly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from esper.config import build, build_environment, compose_config
from esper.controllers import PolicyController
from esper.environment import Environment
from esper.evaluation.arms import ARMS, ArmContext, arms_of_clock
from esper.evaluation.runner import group_jobs, run_jobs
from esper.growth import load_grown
from esper.records import EpisodeRecord
from tests.controllers.fixtures_policies import policy
from tests.evaluation.fixtures_episodes import TASK, evaluated, load_episodes, trained

pytestmark = pytest.mark.xdist_group("arms")  # share one evaluation

EPISODES = 3
EpisodesByArm = dict[str, list[EpisodeRecord]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    directory = tmp_path_factory.mktemp("all")
    evaluated(directory, "controllers=all", f"ckpt={checkpoint}", f"episodes={EPISODES}", "export=ppo",
              "controller.ppo.greedy=false")  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def by_arm(evaluation: Path) -> EpisodesByArm:
    episodes: EpisodesByArm = {}
    for episode in load_episodes(evaluation / "episodes.jsonl"):
        episodes.setdefault(episode.arm, []).append(episode)
    return episodes


def by_seed(episodes: list[EpisodeRecord]) -> dict[int, EpisodeRecord]:
    return {episode.episode_seed: episode for episode in episodes}


def test_every_arm_runs_on_the_same_episode_seeds(by_arm: EpisodesByArm) -> None:
    assert set(by_arm) == {name for name, arm in arms_of_clock(False).items() if arm.is_default}
    seeds = {arm: sorted(episode.episode_seed for episode in episodes) for arm, episodes in by_arm.items()}
    assert len(set(map(tuple, seeds.values()))) == 1
    assert len(set(seeds["none"])) == EPISODES


def test_an_episode_seed_gives_the_same_data_and_weights_in_every_arm(by_arm: EpisodesByArm) -> None:
    """Until an arm acts, its host trains like the host without growth."""
    bare = {episode.episode_seed: episode.steps[0].train_loss for episode in by_arm["none"]}
    for arm in ("schedule", "heuristic"):
        assert {episode.episode_seed: episode.steps[0].train_loss for episode in by_arm[arm]} == bare


def test_static_final_starts_with_the_final_network_of_the_reference(by_arm: EpisodesByArm) -> None:
    references = by_seed(by_arm["ppo"])
    for arm in ("static_final", "static_final_flops"):
        for episode in by_arm[arm]:
            reference = references[episode.episode_seed]
            assert episode.fossils == reference.fossils
            assert episode.parameters == episode.parameters_peak == reference.parameters
            assert episode.checkpoint == reference.checkpoint
            assert {step.action["op"] for step in episode.steps} == {"WAIT"}


def test_arms_matched_in_flops_spend_the_flops_of_the_reference(by_arm: EpisodesByArm) -> None:
    references = by_seed(by_arm["ppo"])
    for arm in ("static_final_flops", "host_flops"):
        for episode in by_arm[arm]:
            assert episode.flops == pytest.approx(references[episode.episode_seed].flops, rel=0.02)
    assert all(episode.fossils == {} and episode.parameters == 3_482 for episode in by_arm["host_flops"])


def test_all_seeds_fills_every_slot_from_the_start(by_arm: EpisodesByArm) -> None:
    for episode in by_arm["all_seeds"]:
        assert episode.fossils == dict.fromkeys(episode.slots, ("conv_light", "ADD"))
        assert episode.steps[0].stage == ["FOSSILIZED"] * 3
        assert episode.parameters_peak == episode.parameters


def test_placebo_seeds_leave_the_host_unchanged_and_cost_rent_and_flops(by_arm: EpisodesByArm) -> None:
    bare = by_seed(by_arm["none"])
    for episode in by_arm["placebo"]:
        host = bare[episode.episode_seed]
        assert episode.parameters == by_arm["all_seeds"][0].parameters
        assert [step.loss for step in episode.steps] == [step.loss for step in host.steps]
        assert episode.test_score == host.test_score
        assert episode.score is not None
        assert host.score is not None
        assert episode.score < host.score
        assert episode.flops > host.flops


def test_replay_repeats_the_actions_of_the_reference_on_another_episode_seed(by_arm: EpisodesByArm) -> None:
    first, second, third = (episode.episode_seed for episode in by_arm["none"])
    source = {first: second, second: first, third: second}
    references = by_seed(by_arm["ppo"])
    for episode in by_arm["replay"]:
        replayed = [step.action for step in references[source[episode.episode_seed]].steps]
        actions = [step.action for step in episode.steps]
        assert all(mine in (theirs, {"op": "WAIT"}) for mine, theirs in zip(actions, replayed, strict=True))
        assert actions[0] == replayed[0]


def test_best_open_loop_is_the_best_schedule_on_other_episode_seeds(by_arm: EpisodesByArm, evaluation: Path) -> None:
    tried = load_episodes(evaluation / "search.jsonl")
    assert len(tried) == 6  # two rounds of three episodes
    assert not by_seed(tried).keys() & by_seed(by_arm["none"]).keys()
    assert all(episode.test_score is None and episode.split == "validation" for episode in tried)
    best = max(tried, key=selection_score)
    for episode in by_arm["best_open_loop"]:
        assert germinate_actions(episode) == germinate_actions(best)


def selection_score(episode: EpisodeRecord) -> float:
    assert episode.selection_score is not None
    return episode.selection_score


def germinate_actions(episode: EpisodeRecord) -> list[dict[str, str]]:
    return [step.action for step in episode.steps if step.action["op"] == "GERMINATE"]


def test_flops_are_the_sum_of_all_parts_and_include_the_policy(by_arm: EpisodesByArm) -> None:
    for arm, episodes in by_arm.items():
        for episode in episodes:
            assert sum(episode.flops_by_part.values()) == pytest.approx(episode.flops)
            assert (episode.flops_by_part["controller"] > 0) == arm.startswith("ppo")
    assert all(episode.flops_by_part["isolated"] == 0 for episode in by_arm["none"] + by_arm["all_seeds"])
    assert any(episode.flops_by_part["isolated"] > 0 for episode in by_arm["schedule"])


def test_the_score_is_the_test_score_minus_rent(by_arm: EpisodesByArm) -> None:
    for episode in by_arm["all_seeds"]:
        rent = torch.tensor(episode.growth).log().item()
        assert episode.test_score is not None
        assert episode.score == pytest.approx(episode.test_score - rent, abs=1e-4)
        assert episode.score != episode.selection_score


def test_the_exported_network_is_the_best_of_its_arm_and_has_its_test_score(
    by_arm: EpisodesByArm, evaluation: Path
) -> None:
    network = load_grown(next(evaluation.glob("grown_*.pt")))
    best = max(by_arm["ppo"], key=selection_score)
    assert network.about["episode_seed"] == best.episode_seed
    assert sum(p.numel() for p in network.parameters()) == best.parameters
    data = build_environment(compose_config("evaluate", TASK)).host_pool.task(0).data
    with torch.no_grad():
        hits = [(network(x).argmax(-1) == y).sum().item() for x, y in data.batches("test", 50)]
    assert 100 * sum(hits) / data.size("test") == pytest.approx(best.test_score)
    preparation = network.about["data"]
    assert (preparation["kind"], preparation["resolution"]) == ("images", 8)


def test_the_report_has_every_arm_and_embeds_its_plots(evaluation: Path) -> None:
    page, text = (evaluation / "report.html").read_text(), (evaluation / "report.md").read_text()
    for arm in [name for name, arm in arms_of_clock(False).items() if arm.is_default]:
        assert f"<td>{arm}</td>" in page
        assert f"| {arm} |" in text
    assert page.count("data:image/png;base64,") == text.count("](pictures/")
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched
    for heading in ("The question", "Results", "Paired differences", "Cost against score", "Performance profile",
                    "Median episodes", "What was grown", "Negative controls", "Accounting", "Protocol"):  # fmt: skip
        assert f"## {heading}" in text
    assert "synthetic_images" in text
    assert "a command" in text


def test_an_episode_does_not_depend_on_episodes_that_run_in_parallel(by_arm: EpisodesByArm) -> None:
    env = build_environment(compose_config("evaluate", TASK))
    expected = by_arm["schedule"][1]
    context = ArmContext(env, [expected.episode_seed], lambda name: build_rule(name, env), str)
    (single,) = run_jobs(env, ARMS["schedule"].create_jobs(context), {}, lambda: None, test=True)
    assert single.score == expected.score
    assert [step.loss for step in single.steps] == [step.loss for step in expected.steps]


def build_rule(name: str, env: Environment) -> Any:
    return build(compose_config("evaluate", TASK).controller[name], space=env.space, _partial_=False)


def test_rounds_have_about_equal_size_and_do_not_split_a_job() -> None:
    env = build_environment(compose_config("evaluate", TASK))
    context = ArmContext(env, range(10), lambda name: build_rule(name, env), str)
    jobs = ARMS["none"].create_jobs(context)
    assert [len(group) for group in group_jobs(jobs, 8)] == [5, 5]
    assert list(group_jobs([], 8)) == []
    policies = {"one": PolicyController(policy(env.layout), greedy=True)}
    context = ArmContext(env, range(5), lambda name: build_rule(name, env), str, policies, {"one": ""})
    pairs = ARMS["ppo_permuted"].create_jobs(context)
    assert [job.episode_seeds for job in pairs] == [(0, 1), (2, 3), (4, 0)]
    assert [[episode_seed for _, _, episode_seed, _ in job.keys] for job in pairs] == [[0, 1], [2, 3], [4]]
    assert [len(group) for group in group_jobs(pairs, 3)] == [1, 1, 1]
