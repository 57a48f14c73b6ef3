"""All arms, played once in small, with a controller that was trained in small."""

from pathlib import Path
from typing import Any

import pytest
import torch

from esper.config import build, build_environment, compose_config
from esper.controllers import PolicyController
from esper.evaluation.arms import ARMS, ArmContext
from esper.evaluation.runner import group_jobs, run_jobs
from esper.growth import load_grown
from esper.records import read_lines
from tests.controllers.fixtures_policies import policy
from tests.evaluation.fixtures_episodes import TASK, evaluated, trained

pytestmark = pytest.mark.xdist_group("arms")  # what they share is made once

EPISODES = 3
Lines = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    directory = tmp_path_factory.mktemp("all")
    evaluated(directory, "controllers=all", f"ckpt={checkpoint}", f"episodes={EPISODES}", "export=ppo",
              "controller.ppo.greedy=false")  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def lines(everything: Path) -> Lines:
    found: Lines = {}
    for line in read_lines(everything / "episodes.jsonl"):
        found.setdefault(line["arm"], []).append(line)
    return found


def test_every_arm_is_played_on_the_same_seeds(lines: Lines) -> None:
    assert set(lines) == set(ARMS)
    seeds = {arm: sorted(line["episode_seed"] for line in played) for arm, played in lines.items()}
    assert len(set(map(tuple, seeds.values()))) == 1
    assert len(set(seeds["none"])) == EPISODES


def test_a_seed_has_the_same_data_and_weights_in_every_arm(lines: Lines) -> None:
    """Until an arm acts, its host does what the host alone does."""
    alone = {line["episode_seed"]: line["steps"][0]["train_loss"] for line in lines["none"]}
    for arm in ("schedule", "heuristic"):
        assert {line["episode_seed"]: line["steps"][0]["train_loss"] for line in lines[arm]} == alone


def test_static_final_begins_with_what_the_reference_ended_with(lines: Lines) -> None:
    ended = {line["episode_seed"]: line for line in lines["ppo"]}
    for arm in ("static_final", "static_final_flops"):
        for line in lines[arm]:
            reference = ended[line["episode_seed"]]
            assert line["fossils"] == reference["fossils"]
            assert line["parameters"] == line["parameters_peak"] == reference["parameters"]
            assert line["checkpoint"] == reference["checkpoint"]
            assert {step["action"]["op"] for step in line["steps"]} == {"WAIT"}


def test_arms_matched_in_flops_spend_what_the_reference_spent(lines: Lines) -> None:
    spent = {line["episode_seed"]: line["flops"] for line in lines["ppo"]}
    for arm in ("static_final_flops", "host_flops"):
        for line in lines[arm]:
            assert line["flops"] == pytest.approx(spent[line["episode_seed"]], rel=0.02)
    assert all(line["fossils"] == {} and line["parameters"] == 3_482 for line in lines["host_flops"])


def test_all_seeds_fills_every_slot_from_the_start(lines: Lines) -> None:
    for line in lines["all_seeds"]:
        assert line["fossils"] == {slot: ["conv_light", "ADD"] for slot in line["slots"]}
        assert line["steps"][0]["stage"] == ["FOSSILIZED"] * 3
        assert line["parameters_peak"] == line["parameters"]


def test_seeds_that_never_learn_leave_the_host_as_it_is_and_cost_their_rent(lines: Lines) -> None:
    alone = {line["episode_seed"]: line for line in lines["none"]}
    for line in lines["placebo"]:
        assert line["parameters"] == lines["all_seeds"][0]["parameters"]
        assert [step["loss"] for step in line["steps"]] == [
            step["loss"] for step in alone[line["episode_seed"]]["steps"]
        ]
        assert line["test_score"] == alone[line["episode_seed"]]["test_score"]
        assert line["score"] < alone[line["episode_seed"]]["score"]
        assert line["flops"] > alone[line["episode_seed"]]["flops"]


def test_replay_repeats_what_the_reference_did_on_another_seed(lines: Lines) -> None:
    first, second, third = (line["episode_seed"] for line in lines["none"])
    given = {first: second, second: first, third: second}
    reference = {line["episode_seed"]: [step["action"] for step in line["steps"]] for line in lines["ppo"]}
    for line in lines["replay"]:
        other = given[line["episode_seed"]]
        actions = [step["action"] for step in line["steps"]]
        assert all(mine in (theirs, {"op": "WAIT"}) for mine, theirs in zip(actions, reference[other], strict=True))
        assert actions[0] == reference[other][0]


def test_the_chosen_timetable_is_the_best_that_was_tried_on_other_seeds(lines: Lines, everything: Path) -> None:
    tried = list(read_lines(everything / "search.jsonl"))
    assert len(tried) == 6  # two rounds of three episodes
    assert not {line["episode_seed"] for line in tried} & {line["episode_seed"] for line in lines["none"]}
    assert all("test_score" not in line for line in tried)
    best = max(tried, key=lambda line: line["selection_score"])
    for line in lines["best_open_loop"]:
        assert germinations(line) == germinations(best)


def germinations(line: dict[str, Any]) -> list[dict[str, str]]:
    return [step["action"] for step in line["steps"] if step["action"]["op"] == "GERMINATE"]


def test_flops_hold_every_part_and_the_controllers_own_passes(lines: Lines) -> None:
    for arm, played in lines.items():
        for line in played:
            assert sum(line["flops_by_part"].values()) == pytest.approx(line["flops"])
            assert (line["flops_by_part"]["controller"] > 0) == arm.startswith("ppo")
    assert all(line["flops_by_part"]["isolated"] == 0 for line in lines["none"] + lines["all_seeds"])
    assert any(line["flops_by_part"]["isolated"] > 0 for line in lines["schedule"])


def test_scores_are_the_test_splits_less_rent(lines: Lines) -> None:
    for line in lines["all_seeds"]:
        growth = torch.tensor(line["parameters"] / line["host_parameters"])
        assert line["score"] == pytest.approx(line["test_score"] - growth.log().item(), abs=1e-4)
        assert line["score"] != line["selection_score"]


def test_the_exported_network_is_the_best_of_its_arm_and_scores_as_it_did(lines: Lines, everything: Path) -> None:
    network = load_grown(next(everything.glob("grown_*.pt")))
    best = max(lines["ppo"], key=lambda line: line["selection_score"])
    assert network.about["seed"] == best["episode_seed"]
    assert sum(p.numel() for p in network.parameters()) == best["parameters"]
    data = build_environment(compose_config("evaluate", TASK)).data
    with torch.no_grad():
        hits = [(network(x).argmax(-1) == y).sum().item() for x, y in data.batches("test", 50)]
    assert 100 * sum(hits) / data.size("test") == pytest.approx(best["test_score"])
    resume_arguments = network.about["data"]
    assert (resume_arguments["kind"], resume_arguments["resolution"]) == ("images", 8)


def test_the_report_names_every_arm_and_holds_its_pictures(everything: Path) -> None:
    page, text = (everything / "report.html").read_text(), (everything / "report.md").read_text()
    for arm in ARMS:
        assert f"<td>{arm}</td>" in page
        assert f"| {arm} |" in text
    assert page.count("data:image/png;base64,") == text.count("](pictures/")
    assert "http" not in page.replace("http-equiv", "")  # nothing is fetched
    for heading in ("The question", "Results", "Paired differences", "Cost against score", "Performance profile",
                    "Median episodes", "What was grown", "Negative controls", "Accounting", "Protocol"):  # fmt: skip
        assert f"## {heading}" in text
    assert "synthetic_images" in text
    assert "a command" in text


def test_an_episode_does_not_depend_on_what_is_played_beside_it(lines: Lines) -> None:
    env = build_environment(compose_config("evaluate", TASK))
    seed = lines["schedule"][1]["episode_seed"]
    context = ArmContext(env, [seed], lambda name: rule(name, env), str)
    alone = run_jobs(env, ARMS["schedule"].jobs(context), {}, lambda: None, test=True)
    assert alone[0]["score"] == lines["schedule"][1]["score"]
    assert [step["loss"] for step in alone[0]["steps"]] == [step["loss"] for step in lines["schedule"][1]["steps"]]


def rule(name: str, env: Any) -> Any:
    return build(compose_config("evaluate", TASK).controller[name], space=env.space, _partial_=False)


def test_rounds_are_of_about_equal_size_and_never_part_a_job() -> None:
    env = build_environment(compose_config("evaluate", TASK))
    context = ArmContext(env, range(10), lambda name: rule(name, env), str)
    jobs = ARMS["none"].jobs(context)
    assert [len(some) for some in group_jobs(jobs, 8)] == [5, 5]
    assert list(group_jobs([], 8)) == []
    learners = {"one": PolicyController(policy(env.layout), greedy=True)}
    pairs = ARMS["ppo_permuted"].jobs(
        ArmContext(env, range(5), lambda name: rule(name, env), str, learners, {"one": ""})
    )
    assert [job.episode_seeds for job in pairs] == [(0, 1), (2, 3), (4, 0)]
    assert [[seed for _, _, seed, _ in job.keys] for job in pairs] == [[0, 1], [2, 3], [4]]
    assert [len(some) for some in group_jobs(pairs, 3)] == [1, 1, 1]
