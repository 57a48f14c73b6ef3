"""Sweeps: many runs from one command."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from esper.config import CONF, compose_config
from esper.sweep import FAILED, alone, completed, installed, same, shared_out

TINY = ("+experiment=oracle", "rounds=1", "environment.envs=2", "collector.warmup=1", "ppo.epochs=1", "logger=none",
        "callbacks.dashboard=null")  # fmt: skip
JOBLIB = OmegaConf.create({"_target_": "hydra_plugins.hydra_joblib_launcher.JoblibLauncher", "n_jobs": -1})
BASIC = OmegaConf.create({"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"})


def swept(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "esper.run", "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_a_failed_job_stops_no_other_and_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    where = tmp_path / "sweep"
    first = swept(*TINY, "seed=0,1", "callbacks.checkpoints.every=1,0", f"hydra.sweep.dir={where}")
    assert first.returncode == 1
    assert "2 of 4 jobs finished" in first.stdout
    assert first.stdout.count("callbacks.checkpoints.every=0: must be at least 1.") == 2  # told at the end
    assert (where / "1" / FAILED).read_text() == "callbacks.checkpoints.every=0: must be at least 1.\n"
    assert f"python -m esper.run -m resume={where}" in first.stdout
    finished = [where / job / "checkpoints/last.ckpt" for job in ("0", "2")]
    before = [path.stat().st_mtime_ns for path in finished]

    (where / "2/summary.json").unlink()  # as if it had been killed after its last round
    second = swept(f"resume={where}", "callbacks.checkpoints.every=1,2")
    assert second.returncode == 0, second.stderr
    assert "4 of 4 jobs finished" in second.stdout
    assert second.stdout.count("finished already") == 1
    assert finished[0].stat().st_mtime_ns == before[0]
    assert "(1 done)" in second.stdout
    assert not list(where.glob(f"*/{FAILED}"))
    found = [OmegaConf.load(where / str(job) / ".hydra/config.yaml").callbacks.checkpoints.every for job in range(4)]
    assert found == [1, 2, 1, 2]
    other = swept(f"resume={where}", "ppo.lr=1e-3")
    assert "holds another sweep, differing in ppo.lr=1e-3; choose another" in other.stderr
    assert not list(where.glob(f"*/{FAILED}"))


def test_what_cannot_be_swept_or_resumed_is_told_in_one_sentence(tmp_path: Path) -> None:
    assert "is no sweep's directory" in swept(f"resume={tmp_path}").stderr
    refused = swept(*TINY, "seed=0,1", "trainer=ddp", "hydra/launcher=joblib", f"hydra.sweep.dir={tmp_path}/new")
    assert refused.returncode == 1
    assert "the joblib launcher runs jobs of one process each" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_a_launcher_that_is_not_installed_is_told_in_one_sentence() -> None:
    for plugin in ("hydra_plugins.nowhere.launcher.Launcher", "nowhere.launcher.Launcher"):
        with pytest.raises(ValueError, match=r"^hydra/launcher: .*nowhere\.launcher is not installed; pip install"):
            installed(plugin)
    installed(BASIC._target_)


def test_a_job_is_complete_when_it_has_played_all_that_is_asked_for(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(rounds=4, decisions=None)
    assert completed(config, tmp_path) is None
    figures = {"rounds": 3, "decisions": 30, "asked": {"rounds": 9, "decisions": 35}, "episode/score": 1.0}
    (tmp_path / "summary.json").write_text(json.dumps(figures))
    assert completed(config, tmp_path) is None
    config.rounds, config.decisions = 9, 35  # another round would have passed that budget
    assert completed(config, tmp_path) == figures
    config.rounds, config.decisions = 3, None
    assert completed(config, tmp_path) == figures
    (tmp_path / "summary.json").write_text("{")
    assert completed(config, tmp_path) is None


def test_a_directory_that_holds_another_sweep_is_refused(tmp_path: Path) -> None:
    same(tmp_path, ["seed=0,1"])  # nothing is there yet
    (tmp_path / "multirun.yaml").write_text("hydra: {overrides: {task: ['seed=0,1', 'ppo.lam=${gamma}', rounds=2]}}")
    same(tmp_path, ["ppo.lam=${gamma}", "seed=0,1", "rounds=9"])  # may go on for longer
    with pytest.raises(ValueError, match="holds another sweep, differing in seed=0,1, seed=0,2; choose another"):
        same(tmp_path, ["ppo.lam=${gamma}", "seed=0,2", "rounds=2"])


def test_jobs_beside_each_other_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    config = compose_config("run", ["+experiment=cifar_ppo"])
    assert shared_out(config, BASIC).environment.threads is None
    assert shared_out(config, JOBLIB).environment.threads == 1
    assert shared_out(config, OmegaConf.merge(JOBLIB, {"n_jobs": 3})).environment.threads == 2
    assert shared_out(config, OmegaConf.merge(BASIC, {"cpus_per_task": 5})).environment.threads == 5
    config.environment.threads = 4
    assert shared_out(config, JOBLIB).environment.threads == 4


def test_several_processes_in_a_job_are_refused_only_under_joblib() -> None:
    for overrides in (["trainer=ddp"], ["trainer.num_nodes=2"]):
        config = compose_config("run", overrides)
        alone(config, BASIC)
        with pytest.raises(ValueError, match="joblib"):
            alone(config, JOBLIB)
    alone(compose_config("run"), JOBLIB)
    alone(compose_config("run", ["trainer.devices=[1]"]), JOBLIB)


@pytest.mark.parametrize("path", sorted((CONF / "sweep").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_sweep_says_its_command_and_every_job_of_it_composes(path: Path) -> None:
    text = path.read_text()
    assert f"# python -m esper.run -m +experiment=cifar_ppo +sweep={path.stem}" in text
    for key, values in OmegaConf.load(path).hydra.sweeper.params.items():
        for value in values.replace("],[", "]|[").split("|") if "[" in values else str(values).split(","):
            compose_config("run", ["+experiment=cifar_ppo", f"{key}={value}"])


@pytest.mark.parametrize("path", sorted((CONF / "hparams_search").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_search_says_its_command_and_searches_what_there_is(path: Path) -> None:
    assert f"# python -m esper.run -m +experiment=cifar_ppo +hparams_search={path.stem}" in path.read_text()
    config = compose_config("run", ["+experiment=cifar_ppo"])
    for key in OmegaConf.load(path).hydra.sweeper.params:
        assert OmegaConf.select(config, key, default=math.inf) != math.inf, key
