"""Sweeps: many runs from one command."""

import json
import math
import os
import re
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from esper.checkpoints import add_task_overrides, apply_trained_values, task_settings
from esper.config import CONF, compose_config, flatten
from esper.run import cli
from esper.sweeps import (
    FAILED,
    check_launcher_installed,
    check_same_sweep,
    check_single_process,
    completed_metrics,
    share_cores,
    write_failure,
)

TINY = ("+experiment=oracle", "rounds=1", "environment.envs=2", "collector.warmup=1", "ppo.epochs=1", "logger=none",
        "callbacks.dashboard=null")  # fmt: skip
JOBLIB = OmegaConf.create({"_target_": "hydra_plugins.hydra_joblib_launcher.JoblibLauncher", "n_jobs": -1})
BASIC = OmegaConf.create({"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"})


@dataclass
class Swept:
    returncode: int
    stdout: str
    stderr: str


def sweep_overrides(*arguments: str) -> Swept:
    """What a sweep comes to whose sweeper is in this process."""
    out, err, code = StringIO(), StringIO(), 0
    patched, warned = pytest.MonkeyPatch.context(), warnings.catch_warnings()
    with patched as patch, warned, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["esper.run", "-m", *arguments])
        warnings.simplefilter("ignore")  # a run has filters of its own
        try:
            cli()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
            err.write("" if isinstance(ended.code, int) else f"{ended.code}\n")
    return Swept(code, out.getvalue(), err.getvalue())


def test_a_failed_job_stops_no_other_and_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    where = tmp_path / "sweep"
    first = sweep_overrides(*TINY, "callbacks.checkpoints.every=1,0,2", f"hydra.sweep.dir={where}")
    assert first.returncode == 1
    assert "2 of 3 jobs finished" in first.stdout
    assert "callbacks.checkpoints.every=0: must be at least 1." in first.stdout  # told at the end
    assert (where / "1" / FAILED).read_text() == "callbacks.checkpoints.every=0: must be at least 1.\n"
    assert f"python -m esper.run -m resume={where}" in first.stdout
    finished = where / "0/checkpoints/last.ckpt"
    before = finished.stat().st_mtime_ns

    (where / "2/summary.json").unlink()  # as if it had been killed after its last round
    second = sweep_overrides(f"resume={where}", "callbacks.checkpoints.every=1,3,2")
    assert second.returncode == 0, second.stderr
    assert "3 of 3 jobs finished" in second.stdout
    assert second.stdout.count("finished already") == 1
    assert finished.stat().st_mtime_ns == before
    assert "(1 done)" in second.stdout
    assert not list(where.glob(f"*/{FAILED}"))
    found = [OmegaConf.load(where / str(job) / ".hydra/config.yaml").callbacks.checkpoints.every for job in range(3)]
    assert found == [1, 3, 2]
    other = sweep_overrides(f"resume={where}", "ppo.lr=1e-3")
    assert "holds another sweep, differing in ppo.lr=1e-3; choose another" in other.stderr
    assert not list(where.glob(f"*/{FAILED}"))


def test_a_job_killed_under_joblib_is_told_of_and_goes_on_when_the_sweep_is_resumed(tmp_path: Path) -> None:
    where = tmp_path / "sweep"
    dies = "+callbacks.witness._target_=tests.ppo.fixtures_ranks.Witness"
    words = (*TINY, dies, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={where}")
    first = sweep_overrides(*words, "+callbacks.witness.dies=null,0")
    assert first.returncode == 1
    assert "jobs finished" in first.stdout
    assert re.search(r"^  1 failed \(.*\): it was killed, or still runs$", first.stdout, re.MULTILINE)
    assert f"python -m esper.run -m resume={where}" in first.stdout
    assert "the sweep ended early: TerminatedWorkerError" in first.stderr
    assert "Traceback" not in first.stderr
    second = sweep_overrides(f"resume={where}", "+callbacks.witness.dies=null,1")
    assert second.returncode == 0, second.stderr
    assert "2 of 2 jobs finished" in second.stdout


def test_submitit_plays_jobs_wherever_a_sweep_puts_them(tmp_path: Path) -> None:
    words = ("hydra/launcher=submitit_local", f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=of/${seed}")
    done = sweep_overrides(*TINY, "seed=0,1", *words)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 jobs finished" in done.stdout
    assert all((tmp_path / "of" / seed / "summary.json").is_file() for seed in "01")


def test_a_search_goes_to_its_end_and_tells_if_everything_failed(tmp_path: Path) -> None:
    search = ("+hparams_search=ppo", "hydra.sweeper.n_trials=2")
    found = sweep_overrides(*TINY, *search, f"hydra.sweep.dir={tmp_path}/found", "optimized_metric=episode/score")
    assert found.returncode == 0, found.stderr
    best = OmegaConf.load(tmp_path / "found/optimization_results.yaml")
    scores = [json.loads((tmp_path / f"found/{job}/summary.json").read_text())["episode/score"] for job in "01"]
    assert best.best_value == max(scores)
    none = sweep_overrides(*TINY, *search, f"hydra.sweep.dir={tmp_path}/none", "callbacks.checkpoints.every=0")
    assert none.returncode == 1
    assert "0 of 2 jobs finished" in none.stdout
    assert "Traceback" not in none.stderr


def test_what_went_wrong_in_a_job_is_written_down_with_where(tmp_path: Path) -> None:
    assert write_failure(ValueError("rounds=0: no."), tmp_path, plain=True) == "rounds=0: no."
    assert (tmp_path / FAILED).read_text() == "rounds=0: no.\n"
    with pytest.raises(KeyError) as raised:
        raise KeyError("lost")
    assert write_failure(raised.value, tmp_path, plain=False) == "KeyError: 'lost'"
    first, *rest = (tmp_path / FAILED).read_text().splitlines()
    assert first == "KeyError: 'lost'"
    assert "test_sweep.py" in "".join(rest)


def test_what_cannot_be_swept_or_resumed_is_told_in_one_sentence(tmp_path: Path) -> None:
    assert "is no sweep's directory" in sweep_overrides(f"resume={tmp_path}").stderr
    refused = sweep_overrides(
        *TINY, "seed=0,1", "trainer=ddp", "hydra/launcher=joblib", f"hydra.sweep.dir={tmp_path}/new"
    )
    assert refused.returncode == 1
    assert "the joblib launcher runs jobs of one process each" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_a_launcher_that_is_not_installed_is_told_in_one_sentence() -> None:
    for plugin in ("hydra_plugins.nowhere.launcher.Launcher", "nowhere.launcher.Launcher"):
        with pytest.raises(ValueError, match=r"^hydra/launcher: .*nowhere\.launcher is not installed; pip install"):
            check_launcher_installed(plugin)
    check_launcher_installed(BASIC._target_)


def test_a_job_is_complete_when_it_has_played_all_that_is_asked_for(tmp_path: Path) -> None:
    config: Any = SimpleNamespace(rounds=4, decisions=None)
    assert completed_metrics(config, tmp_path) is None
    figures = {"rounds": 3, "decisions": 30, "asked": {"rounds": 9, "decisions": 35}, "episode/score": 1.0}
    (tmp_path / "summary.json").write_text(json.dumps(figures))
    assert completed_metrics(config, tmp_path) is None
    config.rounds, config.decisions = 9, 35  # another round would have passed that budget
    assert completed_metrics(config, tmp_path) == figures
    config.rounds, config.decisions = 3, None
    assert completed_metrics(config, tmp_path) == figures
    (tmp_path / "summary.json").write_text("{")
    assert completed_metrics(config, tmp_path) is None


def test_a_directory_that_holds_another_sweep_is_refused(tmp_path: Path) -> None:
    def asked(*typed: str, **params: str) -> DictConfig:
        return OmegaConf.create({"hydra": {"overrides": {"task": [*typed]}, "sweeper": {"params": params or None}}})

    usual = ("seed=0,1", "ppo.lam=${gamma}", "+sweep=rewards")
    check_same_sweep(tmp_path, asked(*usual))  # nothing is there yet
    OmegaConf.save(asked(*usual, "rounds=2", reward="sparse,shaped"), tmp_path / "multirun.yaml")
    longer = ("rounds=9", "sweep.skip_completed=false", *reversed(usual))
    check_same_sweep(tmp_path, asked(*longer, reward="sparse,shaped"))
    with pytest.raises(ValueError, match="holds another sweep, differing in seed=0,1, seed=0,2; choose another"):
        check_same_sweep(tmp_path, asked("seed=0,2", *usual[1:], reward="sparse,shaped"))
    with pytest.raises(ValueError, match=r"differing in \+sweep=rewards, \+sweep=slots; choose another"):
        check_same_sweep(tmp_path, asked(*usual[:2], "+sweep=slots", reward="sparse,shaped"))
    with pytest.raises(ValueError, match="differing in reward=sparse, reward=sparse,shaped; choose another"):
        check_same_sweep(tmp_path, asked(*usual, reward="sparse"))


def test_jobs_beside_each_other_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    config = compose_config("run", ["+experiment=cifar_ppo"])
    assert share_cores(config, BASIC).environment.threads is None
    assert share_cores(config, JOBLIB).environment.threads == 1
    assert share_cores(config, OmegaConf.merge(JOBLIB, {"n_jobs": 3})).environment.threads == 2
    assert share_cores(config, OmegaConf.merge(BASIC, {"cpus_per_task": 5})).environment.threads == 5
    config.environment.threads = 4
    assert share_cores(config, JOBLIB).environment.threads == 4


def test_several_processes_in_a_job_are_refused_only_under_joblib() -> None:
    for overrides in (["trainer=ddp"], ["trainer.num_nodes=2"]):
        config = compose_config("run", overrides)
        check_single_process(config, BASIC)
        with pytest.raises(ValueError, match="joblib"):
            check_single_process(config, JOBLIB)
    check_single_process(compose_config("run"), JOBLIB)
    check_single_process(compose_config("run", ["trainer.devices=[1]"]), JOBLIB)


@pytest.mark.parametrize("path", sorted((CONF / "sweep").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_sweep_says_its_command_and_every_job_of_it_composes(path: Path) -> None:
    text = path.read_text()
    assert f"# python -m esper.run -m +experiment=cifar_ppo +sweep={path.stem}" in text
    for key, values in OmegaConf.load(path).hydra.sweeper.params.items():
        for value in values.replace("],[", "]|[").split("|") if "[" in values else str(values).split(","):
            compose_config("run", ["+experiment=cifar_ppo", f"{key}={value}"])


@pytest.mark.parametrize("experiment", ["cifar_ppo", "oracle_noisy"])
def test_every_ablation_changes_its_own_part_of_an_experiment(experiment: str) -> None:
    parts = {
        "value_target_rest": "ppo", "unmasked": "policy", "reward_shaped": "reward", "all_actions": "actions",
        "unshaped": "reward", "reward_sparse": "reward", "no_memory": "policy", "none": "", "one_epoch": "ppo",
    }  # fmt: skip
    assert set(parts) == {path.stem for path in (CONF / "ablation").glob("*.yaml")}
    whole = flatten(compose_config("run", [f"+experiment={experiment}"]))
    for name, part in parts.items():  # in the order in which a sweep types them
        found = flatten(compose_config("run", [f"+ablation={name}", f"+experiment={experiment}"]))
        changed = {key for key in {**whole, **found} if whole.get(key) != found.get(key)}
        assert {key.split(".")[0] for key in changed} == {part} - {""}, name


@pytest.mark.parametrize("path", sorted((CONF / "ablation").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_was_left_out_in_training_is_left_out_when_a_controller_is_played(path: Path, tmp_path: Path) -> None:
    overrides = ["+experiment=cifar_ppo", f"+ablation={path.stem}"]
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(compose_config("run", overrides), tmp_path / ".hydra/config.yaml")
    OmegaConf.save(overrides, tmp_path / ".hydra/overrides.yaml")
    (tmp_path / "checkpoints").mkdir()
    torch.save({"esper": {"version": 1}}, tmp_path / "checkpoints/last.ckpt")
    typed = add_task_overrides([f"ckpt={tmp_path}"])
    assert overrides == [override for override in typed if override.startswith("+")]
    played = task_settings(apply_trained_values(compose_config("evaluate", typed), typed, [str(tmp_path)]))
    assert played == task_settings(compose_config("run", overrides))


@pytest.mark.parametrize("path", sorted((CONF / "hparams_search").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_ready_search_says_its_command_and_searches_what_there_is(path: Path) -> None:
    assert f"# python -m esper.run -m +experiment=cifar_ppo +hparams_search={path.stem}" in path.read_text()
    config = compose_config("run", ["+experiment=cifar_ppo"])
    for key in OmegaConf.load(path).hydra.sweeper.params:
        assert OmegaConf.select(config, key, default=math.inf) != math.inf, key
