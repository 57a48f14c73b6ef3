"""Sweeps: many runs from one command."""

import json
import math
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

from esper import sweeps
from esper.checkpoints import add_task_overrides, apply_trained_values, task_settings
from esper.command_line import CONF
from esper.config import compose_config, flatten
from esper.controllers import find_checkpoint
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
class SweepResult:
    returncode: int
    stdout: str
    stderr: str


def run_sweep(*arguments: str) -> SweepResult:
    """Run a sweep; its sweeper runs in this process."""
    out, err, code = StringIO(), StringIO(), 0
    patched, warned = pytest.MonkeyPatch.context(), warnings.catch_warnings()
    with patched as patch, warned, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["esper.run", "-m", *arguments])
        warnings.simplefilter("ignore")  # a run sets its own filters
        try:
            cli()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
            err.write("" if isinstance(stop.code, int) else f"{stop.code}\n")
    return SweepResult(code, out.getvalue(), err.getvalue())


def test_a_failed_job_stops_no_other_and_a_sweep_can_be_resumed(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    first = run_sweep(*TINY, "callbacks.checkpoints.every=1,0,2", f"hydra.sweep.dir={directory}")
    assert first.returncode == 1
    assert "2 of 3 jobs finished" in first.stdout
    assert "callbacks.checkpoints.every=0: must be at least 1." in first.stdout  # in the summary
    assert (directory / "1" / FAILED).read_text() == "callbacks.checkpoints.every=0: must be at least 1.\n"
    assert f"python -m esper.run -m resume={directory}" in first.stdout
    finished = directory / "0/checkpoints/last.ckpt"
    before = finished.stat().st_mtime_ns

    (directory / "2/summary.json").unlink()  # as if it had been killed after its last round
    second = run_sweep(f"resume={directory}", "callbacks.checkpoints.every=1,3,2")
    assert second.returncode == 0, second.stderr
    assert "3 of 3 jobs finished" in second.stdout
    assert second.stdout.count("finished already") == 1
    assert finished.stat().st_mtime_ns == before
    assert "(1 done)" in second.stdout
    assert not list(directory.glob(f"*/{FAILED}"))
    configs = [OmegaConf.load(directory / str(job) / ".hydra/config.yaml") for job in range(3)]
    assert [config.callbacks.checkpoints.every for config in configs] == [1, 3, 2]
    other = run_sweep(f"resume={directory}", "ppo.lr=1e-3")
    assert "has another sweep, which differs in ppo.lr=1e-3; choose another directory" in other.stderr
    assert not list(directory.glob(f"*/{FAILED}"))


def test_a_job_killed_under_joblib_is_reported_and_can_be_resumed(tmp_path: Path) -> None:
    directory = tmp_path / "sweep"
    recorder = "+callbacks.recorder._target_=tests.ppo.fixtures_ranks.RankRecorder"
    arguments = (*TINY, recorder, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", f"hydra.sweep.dir={directory}")
    first = run_sweep(*arguments, "+callbacks.recorder.killed_rank=null,0")
    assert first.returncode == 1
    assert "jobs finished" in first.stdout
    assert re.search(r"^  1 failed \(.*\): it was killed or is still running$", first.stdout, re.MULTILINE)
    assert f"python -m esper.run -m resume={directory}" in first.stdout
    assert "the sweep ended early: TerminatedWorkerError" in first.stderr
    assert "Traceback" not in first.stderr
    second = run_sweep(f"resume={directory}", "+callbacks.recorder.killed_rank=null,1", "hydra.launcher.n_jobs=1")
    assert second.returncode == 0, second.stderr
    assert "2 of 2 jobs finished" in second.stdout


def test_submitit_runs_jobs_in_nested_directories_of_a_sweep(tmp_path: Path) -> None:
    launcher = ("hydra/launcher=submitit_local", f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=nested/${seed}")
    result = run_sweep(*TINY, "seed=0,1", *launcher)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 jobs finished" in result.stdout
    assert all((tmp_path / "nested" / seed / "summary.json").is_file() for seed in "01")


def test_a_search_finds_the_best_trial_and_reports_if_all_failed(tmp_path: Path) -> None:
    search = ("+hparams_search=ppo", "hydra.sweeper.n_trials=2")
    result = run_sweep(*TINY, *search, f"hydra.sweep.dir={tmp_path}/good", "optimized_metric=episode/score")
    assert result.returncode == 0, result.stderr
    best = OmegaConf.load(tmp_path / "good/optimization_results.yaml")
    scores = [json.loads((tmp_path / f"good/{job}/summary.json").read_text())["episode/score"] for job in "01"]
    assert best.best_value == max(scores)
    failed = run_sweep(
        *TINY, *search, "hydra.sweeper.n_trials=1", f"hydra.sweep.dir={tmp_path}/bad", "callbacks.checkpoints.every=0"
    )
    assert failed.returncode == 1
    assert "0 of 1 jobs finished" in failed.stdout
    assert "Traceback" not in failed.stderr


def test_the_reason_of_a_failed_job_is_written_with_its_traceback(tmp_path: Path) -> None:
    assert write_failure(ValueError("rounds=0: no."), tmp_path, plain=True) == "rounds=0: no."
    assert (tmp_path / FAILED).read_text() == "rounds=0: no.\n"
    with pytest.raises(KeyError) as raised:
        raise KeyError("lost")
    assert write_failure(raised.value, tmp_path, plain=False) == "KeyError: 'lost'"
    first, *rest = (tmp_path / FAILED).read_text().splitlines()
    assert first == "KeyError: 'lost'"
    assert "test_sweeps.py" in "".join(rest)


def test_a_sweep_that_cannot_run_or_be_resumed_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert "must be latest or the directory of the sweep to resume." in run_sweep(f"resume={tmp_path}").stderr
    refused = run_sweep(*TINY, "seed=0,1", "trainer=ddp", "hydra/launcher=joblib", f"hydra.sweep.dir={tmp_path}/new")
    assert refused.returncode == 1
    assert "must both be 1 for the joblib launcher" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_a_launcher_that_is_not_installed_is_refused_in_one_sentence() -> None:
    for plugin in ("hydra_plugins.nowhere.launcher.Launcher", "nowhere.launcher.Launcher"):
        with pytest.raises(ValueError, match=r"^hydra/launcher: .*nowhere\.launcher is not installed; pip install"):
            check_launcher_installed(plugin)
    check_launcher_installed(BASIC._target_)


@pytest.mark.parametrize("key", ["requested", "asked"])  # asked: version 0.1
def test_a_job_is_complete_when_it_has_its_requested_length(tmp_path: Path, key: str) -> None:
    config: Any = SimpleNamespace(rounds=4, decisions=None)
    assert completed_metrics(config, tmp_path) is None
    counts = {"rounds": 3, "decisions": 30, "episode/score": 1.0}
    metrics = {**counts, "requested": {"rounds": 9, "decisions": 35}}
    (tmp_path / "summary.json").write_text(json.dumps({**counts, key: metrics["requested"]}))
    assert completed_metrics(config, tmp_path) is None
    config.rounds, config.decisions = 9, 35  # one more round would have exceeded that budget
    assert completed_metrics(config, tmp_path) == metrics
    config.rounds, config.decisions = 3, None
    assert completed_metrics(config, tmp_path) == metrics
    (tmp_path / "summary.json").write_text("{")
    assert completed_metrics(config, tmp_path) is None


def test_a_directory_of_another_sweep_is_refused(tmp_path: Path) -> None:
    def sweep(*typed: str, **params: str) -> DictConfig:
        return OmegaConf.create({"hydra": {"overrides": {"task": [*typed]}, "sweeper": {"params": params or None}}})

    typed = ("seed=0,1", "ppo.lam=${gamma}", "+sweep=rewards")
    check_same_sweep(tmp_path, sweep(*typed))  # the directory is empty
    OmegaConf.save(sweep(*typed, "rounds=2", reward="sparse,shaped"), tmp_path / "multirun.yaml")
    longer = ("rounds=9", "sweep.skip_completed=false", *reversed(typed))
    check_same_sweep(tmp_path, sweep(*longer, reward="sparse,shaped"))
    with pytest.raises(ValueError, match="has another sweep, which differs in seed=0,1, seed=0,2; choose another"):
        check_same_sweep(tmp_path, sweep("seed=0,2", *typed[1:], reward="sparse,shaped"))
    with pytest.raises(ValueError, match=r"differs in \+sweep=rewards, \+sweep=slots; choose another"):
        check_same_sweep(tmp_path, sweep(*typed[:2], "+sweep=slots", reward="sparse,shaped"))
    with pytest.raises(ValueError, match="differs in reward=sparse, reward=sparse,shaped; choose another"):
        check_same_sweep(tmp_path, sweep(*typed, reward="sparse"))


def test_parallel_jobs_and_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "available_cores", lambda: 8)
    config = compose_config("run", ["+experiment=cifar_ppo"])

    def share(composed: DictConfig, launcher: DictConfig) -> tuple[int | None, int | None]:
        environment = share_cores(composed, launcher).environment
        return environment.workers, environment.threads

    assert share(config, BASIC) == (None, None)
    assert share(config, JOBLIB) == (0, 1)  # a job on each core
    assert share(config, OmegaConf.merge(JOBLIB, {"n_jobs": 3})) == (2, 2)
    assert share(config, OmegaConf.merge(BASIC, {"cpus_per_task": 5})) == (5, 5)
    ddp = compose_config("run", ["+experiment=cifar_ppo", "trainer=ddp"])
    assert share(ddp, BASIC) == (4, 4)
    assert share(ddp, OmegaConf.merge(BASIC, {"cpus_per_task": 5})) == (5, 5)  # of each rank
    ddp.device = "cuda:0"
    assert share(ddp, BASIC) == (0, 4)  # threads train hosts on a GPU
    config.environment.threads, config.environment.workers = 4, 6
    assert share(config, JOBLIB) == (6, 4)
    oracle = compose_config("run", ["+experiment=oracle", "trainer=ddp"])
    assert share_cores(oracle, BASIC) == oracle


def test_several_processes_in_a_job_are_refused_only_under_joblib() -> None:
    for overrides in (["trainer=ddp"], ["trainer.num_nodes=2"]):
        config = compose_config("run", overrides)
        check_single_process(config, BASIC)
        with pytest.raises(ValueError, match="joblib"):
            check_single_process(config, JOBLIB)
    check_single_process(compose_config("run"), JOBLIB)
    check_single_process(compose_config("run", ["trainer.devices=[1]"]), JOBLIB)


@pytest.mark.parametrize("path", sorted((CONF / "sweep").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_preset_opens_with_its_command_and_its_jobs_compose(path: Path) -> None:
    text = path.read_text()
    experiment = "cifar_batches_ppo" if path.stem == "ablations" else "cifar_ppo"
    assert f"# python -m esper.run -m +experiment={experiment} +sweep={path.stem}" in text
    for key, values in OmegaConf.load(path).hydra.sweeper.params.items():
        for value in values.replace("],[", "]|[").split("|") if "[" in values else str(values).split(","):
            compose_config("run", ["+experiment=cifar_ppo", f"{key}={value}"])


@pytest.mark.parametrize("experiment", ["cifar_batches_ppo", "oracle_noisy"])
def test_every_ablation_changes_only_its_own_group_of_an_experiment(experiment: str) -> None:
    groups = {
        "value_target_rest": "ppo", "unmasked": "policy", "reward_shaped": "reward", "all_actions": "actions",
        "unshaped": "reward", "reward_sparse": "reward", "no_memory": "policy", "none": "", "one_epoch": "ppo",
    }  # fmt: skip
    assert set(groups) == {path.stem for path in (CONF / "ablation").glob("*.yaml")}
    whole = flatten(compose_config("run", [f"+experiment={experiment}"]))
    for name, group in groups.items():
        ablated = flatten(compose_config("run", [f"+ablation={name}", f"+experiment={experiment}"]))  # a sweep's order
        changed = {key for key in {**whole, **ablated} if whole.get(key) != ablated.get(key)}
        assert {key.split(".")[0] for key in changed} == {group} - {""}, name


@pytest.mark.parametrize("path", sorted((CONF / "ablation").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_controller_is_evaluated_with_the_ablation_of_its_training(path: Path, tmp_path: Path) -> None:
    overrides = ["+experiment=cifar_ppo", f"+ablation={path.stem}"]
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(compose_config("run", overrides), tmp_path / ".hydra/config.yaml")
    OmegaConf.save(overrides, tmp_path / ".hydra/overrides.yaml")
    (tmp_path / "checkpoints").mkdir()
    shipped = torch.load(find_checkpoint("pretrained"), weights_only=True)
    del shipped["esper"]["training"]  # so that the configuration of the run is read
    torch.save(shipped, tmp_path / "checkpoints/last.ckpt")
    typed = add_task_overrides([f"ckpt={tmp_path}"])
    assert overrides == [override for override in typed if override.startswith("+")]
    evaluated = task_settings(apply_trained_values(compose_config("evaluate", typed), typed, [str(tmp_path)]))
    blueprints = list(shipped["esper"]["layout"]["blueprints"])
    assert evaluated == {**task_settings(compose_config("run", overrides)), "slots.blueprints": blueprints}


@pytest.mark.parametrize("path", sorted((CONF / "hparams_search").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_search_preset_opens_with_its_command_and_searches_existing_keys(path: Path) -> None:
    assert f"# python -m esper.run -m +experiment=cifar_ppo +hparams_search={path.stem}" in path.read_text()
    config = compose_config("run", ["+experiment=cifar_ppo"])
    for key in OmegaConf.load(path).hydra.sweeper.params:
        assert OmegaConf.select(config, key, default=math.inf) != math.inf, key
