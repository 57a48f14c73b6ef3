"""python -m esper.tune: the command, its files, and its errors."""

import json
import sys
from importlib import util
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from esper import tune
from esper.config import build_vector_env, check_tuning_config, compose_config
from esper.controllers import RULE_RANGES
from esper.tasks import KnownTask, TaskList, task_digest
from esper.tuning import job

ORACLE = ("+experiment=oracle_tasks", "tune.population=4", "tune.generation_seeds=4", "tune.fresh=4")
TINY = (
    "tasks=diagnosis", "data=synthetic_images", "data.resolution=8", "data.train=400", "data.validation=100",
    "data.test=100", "environment=budget", "environment.budget=0.04", "environment.steps=5", "environment.batch=16",
    "environment.workers=0", "environment.threads=1", "environment.envs=8", "lifecycle=quick", "actions=lean",
    "environment.validation_samples=50", "tune.population=4", "tune.generation_seeds=2", "tune.fresh=1",
)  # fmt: skip


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "search"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["esper.tune", *arguments])
    tune.cli()


def test_a_search_writes_numbers_that_an_evaluation_takes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, *ORACLE, "tune.episodes=60", f"hydra.run.dir={directory}")
    result = json.loads((directory / "tuning.json").read_text())
    assert result["episodes"] == len((directory / "tuning.jsonl").read_text().splitlines())
    searchpath = f"hydra.searchpath=['file://{directory}']"
    config = compose_config("evaluate", ["controller@controller.tuned_rule=tuned", searchpath])
    taken = OmegaConf.to_container(config.controller.tuned_rule)
    assert {name: taken[name] for name in RULE_RANGES} == result["numbers"]
    printed = capsys.readouterr().out
    assert '"controller@controller.tuned_rule=tuned" "controllers=[none,tuned_rule]"' in printed
    run(monkeypatch, f"resume={directory}", "tune.episodes=80")
    assert json.loads((directory / "tuning.json").read_text())["generations"] == result["generations"] + 1
    with pytest.raises(SystemExit, match=r"a resumed search keeps its tune\.sigma"):
        run(monkeypatch, f"resume={directory}", "tune.sigma=0.5")


def test_a_search_on_hosts_draws_training_tasks_and_counts_flops(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, *TINY, "tune.episodes=13", f"hydra.run.dir={directory}")
    result = json.loads((directory / "tuning.json").read_text())
    assert result["gflops"] == pytest.approx(result["episodes"] * 0.04, rel=0.5)
    drawn = job.training_tasks(compose_config("tune", [*TINY, "+rounds=3"]))
    environment = build_vector_env(drawn)
    seeds = [environment.episode_seed("tuning", 0, index) for index in range(4)]
    assert sorted(environment.host_pool.task(seed).family for seed in seeds) == [
        "complete", "no_activation", "no_space", "saturated",
    ]  # fmt: skip
    assert {environment.host_pool.task(seed).split for seed in seeds} == {"train"}


def test_known_scores_without_growth_are_those_of_the_task_list(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = job.training_tasks(compose_config("tune", list(TINY)))
    environment, (spec, *_) = build_vector_env(drawn), job.task_specs(drawn)
    known = KnownTask(spec.name, spec.family, spec.split, task_digest(spec), (40.0, 42.0), ())
    monkeypatch.setattr(TaskList, "load", lambda name: TaskList(name, [known], {}))
    none = job.known_scores(drawn, environment)
    by_task = {
        environment.host_pool.host_name(seed): none(seed) for seed in environment.host_pool.episode_seeds("a", 0, 0)
    }
    assert by_task.pop(spec.name) == 41.0
    assert set(by_task.values()) == {None}


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("controller.trial=0.9", r"^controller\.tuned_rule\.trial=0\.9: must be between 0\.02 and 0\.3\.$"),
        ("tune.episodes=10", r"^tune\.episodes=10: must be at least 36"),
        ("tune.sigma=2", r"^tune\.sigma=2: must be"),
        ("tune.population=1", r"^tune\.population=1: must be"),
    ],
)
def test_bad_input_ends_in_one_sentence_and_leaves_no_directory(
    override: str, sentence: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=sentence):
        run(monkeypatch, *ORACLE, f"hydra.run.dir={directory}", override)
    assert not directory.exists()


def test_without_cmaes_one_sentence_names_the_extra(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr("esper.plugins.find_spec", lambda name: None if name == "cmaes" else find(name))
    with pytest.raises(
        SystemExit, match=r"^esper\.tune: needs cmaes, which is not installed; pip install 'esper\[tune\]'"
    ):
        run(monkeypatch, *ORACLE, f"hydra.run.dir={directory}")


def test_experiments_compose_for_a_search() -> None:
    for name in ("zoo_ppo", "cifar_ppo"):
        check_tuning_config(compose_config("tune", [f"+experiment={name}", "data=synthetic_images"]))
