"""GrowthBench: lists of instances from evaluations, and agents scored against them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from esper.config import compose_config
from esper.evaluation.gather import gather_directory
from esper.evaluation.growthbench import (
    ArmScore,
    Instance,
    InstanceList,
    compare_with_list,
    instance_path,
    load_instances,
    make_instances,
)
from esper.evaluation.run import evaluate
from esper.growthbench import main
from tests.evaluation.fixtures_episodes import load_episodes, write_episodes
from tests.evaluation.test_task_searches import SMALL_SEARCH, TASKS

pytestmark = pytest.mark.xdist_group("growthbench")  # share one evaluation

LIST_KEYS = ("experiment", "tasks", "tasks.split", "tasks.counts.test", "episodes")  # that a list sets
SETTINGS = [each for each in SMALL_SEARCH if each.partition("=")[0].lstrip("+") not in LIST_KEYS]


class Patient:
    """Never grows: the arm none with other words."""

    def __init__(self, actions: list[str]) -> None:
        self.wait = actions.index("WAIT")

    def act(self, observation: dict[str, np.ndarray], info: dict[str, Any]) -> int:
        return self.wait


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluated")
    arms = "controllers=[none,full,gated]"
    evaluate(compose_config("evaluate", [*SMALL_SEARCH, arms]), directory, Console(quiet=True))
    return directory


@pytest.fixture(scope="module")
def instances(evaluation: Path) -> Path:
    path = evaluation / "instances.json"
    main(["cifar_zoo", "--write", str(evaluation), "--instances", str(path)])
    return path


def test_a_list_has_what_every_arm_scores_on_each_instance(evaluation: Path, instances: Path) -> None:
    found = load_instances("cifar_zoo", instances)
    assert found == make_instances("cifar_zoo", [gather_directory(evaluation)])
    assert [instance.split for instance in found.instances] == ["test"] * TASKS
    assert (found.counts, found.episodes, found.seed) == ({"test": TASKS}, 2, 0)
    assert found.settings["data.resolution"] == 8
    assert set(found.arms) == {"none", "full", "gated"}
    episodes = load_episodes(evaluation / "episodes.jsonl")
    for instance in found.instances:
        assert instance.name.endswith(instance.family)
        assert len(instance.digest) == 16
        own = [e.score or 0.0 for e in episodes if e.arm == "full" and e.host == instance.name]
        assert instance.arms["full"].mean == pytest.approx(np.mean(own), abs=1e-3)
        assert instance.arms["full"].spread == pytest.approx(np.std(own, ddof=1), abs=1e-3)
        assert (instance.arms["full"].episodes, instance.arms["full"].controllers) == (2, 0)
    assert instances.stat().st_size < 4000


def test_an_agent_runs_on_the_episode_seeds_of_the_list(
    evaluation: Path, instances: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["cifar_zoo", f"agent={__name__}:Patient", "--instances", str(instances), "--out", str(out), *SETTINGS]
    main(command)
    printed = capsys.readouterr().out
    assert "cifar_zoo, test: Patient" in printed
    ours, theirs = load_episodes(out / "test/episodes.jsonl"), load_episodes(evaluation / "episodes.jsonl")
    assert {e.episode_seed for e in ours} == {e.episode_seed for e in theirs}
    assert {e.arm for e in ours} == {"Patient"}
    saved = json.loads((out / "growthbench.json").read_text())
    assert set(saved["compared"]["test"]) == {"none", "full", "gated"}
    for task, score in saved["scores"]["test"].items():
        assert score["episodes"] == 2
        assert score["mean"] == pytest.approx(np.mean([e.score for e in ours if e.host == task]), abs=1e-3)
    before = (out / "test/episodes.jsonl").read_text()
    main(command)
    assert (out / "test/episodes.jsonl").read_text() == before, "finished episodes do not run again"


def test_an_agent_is_compared_with_each_arm_over_instances() -> None:
    def score(mean: float) -> ArmScore:
        return ArmScore(mean, 1.0, 8, 0)

    instances = [
        Instance(f"test0{n}_a", "a", "test", str(n), {"none": score(30.0 + n), "full": score(33.0 - n)})
        for n in range(6)
    ]
    none, full = compare_with_list({each.name: score(31.0 + n) for n, each in enumerate(instances)}, instances)
    assert (none.arm, full.arm) == ("none", "full")
    assert none.score == 32.5
    assert (none.difference.value, none.difference.low, none.above) == (1.0, 1.0, 6)
    assert full.difference.value == pytest.approx(3.0)
    assert full.above == 4
    assert full.difference.low < 0 < full.difference.high


def test_a_list_and_a_command_that_do_not_fit_are_refused(evaluation: Path, instances: Path, tmp_path: Path) -> None:
    def error_of(*arguments: str, name: str = "cifar_zoo", path: Path = instances) -> str:
        with pytest.raises(SystemExit) as error:
            main([name, "--instances", str(path), "--out", str(tmp_path / "out"), *arguments])
        return str(error.value)

    agent = f"agent={__name__}:Patient"
    assert "exactly one of them must be typed" in error_of(*SETTINGS)
    assert "exactly one of them must be typed" in error_of(agent, "ckpt=pretrained", *SETTINGS)
    assert error_of(agent, "episodes=4").startswith("episodes=4: must not be typed, as the list of instances sets")
    assert error_of(agent, "tasks.counts.test=4").startswith("tasks.counts.test=4: must not be typed")
    resolution = [each for each in SETTINGS if not each.startswith("data.resolution")]
    assert error_of(agent, *resolution, "data.resolution=16").startswith("data.resolution=16: must be 8, as scores")
    assert "must be the task that the list was measured on" in error_of(agent, *SETTINGS, "tasks.seed=1")
    assert error_of(agent, "--split", "heldout").startswith("--split heldout: must be one of test")
    assert "must be a list of diagnosis, but is one of cifar_zoo" in error_of(agent, name="diagnosis")
    missing = tmp_path / "none.json"
    assert f"{missing}: there is no list of instances; python -m esper.growthbench cifar_zoo" in error_of(path=missing)


def test_only_finished_evaluations_on_unseen_tasks_give_a_list(evaluation: Path, tmp_path: Path) -> None:
    episodes = load_episodes(evaluation / "episodes.jsonl")
    write_episodes(tmp_path / "episodes.jsonl", episodes[:-1])
    with pytest.raises(ValueError, match=r"must be a finished evaluation, but gated has 1 of 2 episodes on test"):
        make_instances("cifar_zoo", [gather_directory(tmp_path)])
    one = [episode for episode in episodes if episode.host == episodes[0].host]
    write_episodes(tmp_path / "episodes.jsonl", one)
    with pytest.raises(ValueError, match=r"must have episodes of every task, but has none of test"):
        make_instances("cifar_zoo", [gather_directory(tmp_path)])
    tasks = {**episodes[0].config["tasks"], "split": "train"}
    seen = [replace(episode, config={**episode.config, "tasks": tasks}) for episode in episodes]
    write_episodes(tmp_path / "episodes.jsonl", seen)
    with pytest.raises(ValueError, match="must be an evaluation with tasks=cifar_zoo and split=test or heldout"):
        make_instances("cifar_zoo", [gather_directory(tmp_path)])
    with pytest.raises(ValueError, match="must have tasks of another split than test, which is there"):
        make_instances("cifar_zoo", [gather_directory(evaluation)] * 2)


def test_shipped_lists_can_be_read() -> None:
    for path in instance_path("cifar_zoo").parent.glob("*.json"):
        assert isinstance(load_instances(path.stem), InstanceList)
