"""Every documented command and key, typed as a user types it, with small sizes."""

import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from esper.data import cifar10
from esper.data.images import Labelled

PROJECT = Path(__file__).parent.parent
TINY = (
    "data.train=200 data.validation=40 data.test=40 data.resolution=8 environment.batch=16 environment.batches=2 "
    "environment.threads=1"
)
BUDGET = TINY.replace("environment.batches=2", "environment.budget=0.01")  # of experiments with a budget of FLOPs
FAST = "debug=fast validate_every=0 callbacks.dashboard=null"  # drawing takes most of a tiny run
STORIES = (
    "data=synthetic_stories host=tinystories_small host.channels=16 host.heads=2 data.block_size=16 "
    "data.vocabulary=257 data.train_bytes=9000 data.validation_bytes=2000 data.test_bytes=2000 optimizer=adamw "
    "environment.batch=4 environment.batches=2 environment.threads=1"
)
EVALUATION = f"{BUDGET} environment.steps=4 environment.envs=2 episodes=2"
MAKE = {  # the command of each target
    "run": "python -m esper.run +experiment=cifar_ppo",
    "quickstart": "python -m esper.run +experiment=quickstart",
    "test": "pytest --numprocesses 2",
    "bench": "python benchmarks/engine.py",
    "docs": "python -m mkdocs build --strict",
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty working directory, and random images instead of CIFAR-10."""

    def images(count: int) -> Labelled:
        draws = torch.Generator().manual_seed(count)
        pixels = torch.randint(256, (count, 32, 32, 3), dtype=torch.uint8, generator=draws)
        return Labelled(pixels, torch.arange(count) % 10)

    monkeypatch.setattr(cifar10, "read_cifar10", lambda root: (images(300), images(50)))
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def run(command: str) -> None:
    """Run `python -m MODULE ARGUMENTS` in this process."""
    python, option, module, *arguments = shlex.split(command)
    assert (python, option) == ("python", "-m")
    found = import_module(module if module != "esper.data" else "esper.data.__main__")
    entry: Callable[[], object] = getattr(found, "cli", None) or found.main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *arguments])
        try:
            entry()
        except SystemExit as stop:
            if stop.code:
                pytest.fail(str(stop.code))


@pytest.mark.parametrize(
    "command",
    [
        f"{MAKE['run']} {FAST} {BUDGET} environment.budget=5",
        f"{MAKE['quickstart']} {FAST} {TINY}",
        f"python -m esper.run data=cifar10 host=cifar_blind reward=shaped actions=full slots=all {FAST} {TINY}",
        "python -m esper.run data=synthetic_images slots.names=[block1,block3] reward=sparse actions=core trainer=cpu "
        f"seed=3 gamma=0.9 environment.envs=1 environment.steps=3 optimized_metric=episode/return {FAST} {TINY}",
        f"python -m esper.run {STORIES} {FAST}",
    ],
    ids=["run", "quickstart", "cifar10", "synthetic_images", "synthetic_stories"],
)
def test_a_training_command_writes_its_summary(command: str, tmp_path: Path) -> None:
    run(f"{command} rounds=1")
    assert list(tmp_path.glob("outputs/*/*/summary.json"))


@pytest.mark.parametrize("arguments", ["controllers=[none,random] seed=1", "ckpt=pretrained"])
def test_an_evaluation_command_writes_its_report(arguments: str, tmp_path: Path) -> None:
    run(f"python -m esper.evaluate +experiment=cifar_ppo {arguments} {EVALUATION}")
    assert list(tmp_path.glob("outputs/evaluate/*/report.md"))


def test_a_run_is_resumed_reported_evaluated_and_shown_in_tensorboard(tmp_path: Path) -> None:
    run(f"python -m esper.run name=tiny data=synthetic_images {FAST} {TINY} rounds=1")
    (directory,) = tmp_path.glob("outputs/tiny/*")
    run("python -m esper.run resume=latest rounds=2")
    run(f"python -m esper.run resume={directory} rounds=3")
    assert len((directory / "rounds.jsonl").read_text().splitlines()) == 3
    assert (directory / "checkpoints/last.ckpt").is_file()
    run(f"python -m esper.evaluate ckpt={directory} controllers=[none,ppo] episodes=1")
    run(f"python -m esper.report {directory}")
    assert (directory / "report.html").is_file()
    shown = EventMultiplexer().AddRunsFromDirectory("outputs").Reload()
    assert any("episode/score" in tags["scalars"] for tags in shown.Runs().values())


def test_a_sweep_is_resumed(tmp_path: Path) -> None:
    metric = "optimized_metric=validation/greedy_score"
    run(f"python -m esper.run -m name=tiny seed=0,1 data=synthetic_images {FAST} {TINY} rounds=1 {metric}")
    run("python -m esper.run -m resume=latest rounds=2")
    jobs = list(tmp_path.glob("multirun/tiny/*/*/rounds.jsonl"))
    assert [len(job.read_text().splitlines()) for job in jobs] == [2, 2]


def test_data_is_fetched_ahead_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    run("python -m esper.data cifar10")
    assert "350 images" in capsys.readouterr().out


@pytest.mark.parametrize("target", MAKE)
def test_make_runs_the_documented_command(target: str) -> None:
    recipe = subprocess.run(["make", "-n", target], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    assert MAKE[target] in recipe.replace(".venv/bin/", "")
