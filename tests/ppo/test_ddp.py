"""Distributed training with two processes on one machine (gloo)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from esper.config import compose_config
from esper.ppo import RankLostError, detect_lost_rank, distributed
from esper.records import read_rounds
from esper.training import train
from tests.fixtures_process import TIMEOUT

pytestmark = pytest.mark.xdist_group("ranks")  # so that the runs they share are made once

TASK = (
    "+experiment=oracle", "collector.warmup=4", "ppo.epochs=3", "validate_every=0",
    "+callbacks.recorder._target_=tests.ppo.fixtures_ranks.RankRecorder",
)  # fmt: skip


def start(directory: Path, *overrides: str) -> "subprocess.Popen[str]":
    has_directory = "-m" in overrides or any(override.startswith("resume=") for override in overrides)
    run_dir = [] if has_directory else [f"hydra.run.dir={directory}"]
    command = [sys.executable, "-m", "esper.run", *overrides, *run_dir]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def wait_for_output(process: "subprocess.Popen[str]") -> str:
    """Everything that a process prints until it ends."""
    return process.communicate(timeout=TIMEOUT)[0]


def load_record(directory: Path, rank: int = 0) -> dict[str, Any]:
    record: dict[str, Any] = torch.load(directory / f"rank{rank}.pt", weights_only=True)
    return record


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """One process with eight environments for three rounds, two with four each for two rounds, and their output."""
    root = tmp_path_factory.mktemp("ranks")
    two_ranks = start(root / "two", *TASK, "environment.envs=4", "trainer=ddp", "rounds=2")
    (root / "one").mkdir()
    config = compose_config("run", [*TASK, "environment.envs=8", "rounds=3"])
    train(config, root / "one", Console(quiet=True))
    printed = wait_for_output(two_ranks)
    assert two_ranks.returncode == 0, printed
    return root / "one", root / "two", printed


def test_both_ranks_end_with_the_same_weights_and_statistics(runs: tuple[Path, Path, str]) -> None:
    first, second = (load_record(runs[1], rank)["state"] for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_ranks_run_the_same_episodes_as_one_process(runs: tuple[Path, Path, str]) -> None:
    single, ranks = load_record(runs[0]), [load_record(runs[1], rank) for rank in range(2)]
    for number in range(2):
        parts = [rank["rounds"][number] for rank in ranks]
        assert parts[0]["episode_seeds"] + parts[1]["episode_seeds"] == single["rounds"][number]["episode_seeds"]
        for name in ("action", "log_prob"):
            joined = torch.cat([part[name] for part in parts])
            torch.testing.assert_close(joined, single["rounds"][number][name], atol=1e-5, rtol=1e-5)


def test_two_ranks_reach_the_statistics_of_one_process(runs: tuple[Path, Path, str]) -> None:
    for number in range(2):
        two, one = (load_record(run)["rounds"][number]["statistics"] for run in (runs[1], runs[0]))
        assert len(one) == 9  # mean, variance and count, each of base features, slot features and returns
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_two_ranks_learn_as_one_process_with_a_separate_critic_and_a_baseline_over_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    parts = (*TASK, "ppo=many_tasks", "ppo.critic_warmup=0", "ppo.critic_epochs=2", "rounds=2")
    two_ranks = start(tmp_path / "two", *parts, "environment.envs=4", "trainer=ddp")
    train(compose_config("run", [*parts, "environment.envs=8"]), tmp_path / "one", Console(quiet=True))
    printed = wait_for_output(two_ranks)
    assert two_ranks.returncode == 0, printed
    ranks, single = [load_record(tmp_path / "two", rank)["state"] for rank in range(2)], load_record(tmp_path / "one")
    assert any(name.startswith("critic.") for name in single["state"])
    for name, value in single["state"].items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], value, atol=1e-4, rtol=1e-3, msg=name)


def test_only_one_rank_prints_and_writes(runs: tuple[Path, Path, str]) -> None:
    _, two, printed = runs
    assert printed.count("round 2/2") == 1
    assert [line["round"] for line in read_rounds(two / "rounds.jsonl")] == [1, 2]
    single = read_rounds(runs[0] / "rounds.jsonl")[1]
    line = read_rounds(two / "rounds.jsonl")[1]
    assert line["decisions"] == single["decisions"]
    for name in ("episode/score", "policy/kl", "losses/explained_variance", "policy/advantage_std"):
        assert line[name] == pytest.approx(single[name], rel=1e-3, abs=1e-5)


def test_a_run_resumes_with_several_ranks(runs: tuple[Path, Path, str], tmp_path: Path) -> None:
    one, two, _ = runs
    shutil.copytree(two, tmp_path / "run")
    resumed = start(tmp_path / "run", f"resume={tmp_path / 'run'}", "rounds=3")
    printed = wait_for_output(resumed)
    assert resumed.returncode == 0, printed
    ranks, single = [load_record(tmp_path / "run", rank) for rank in range(2)], load_record(one)
    assert all(torch.equal(ranks[0]["state"][name], ranks[1]["state"][name]) for name in single["state"])
    episode_seeds = [seed for rank in ranks for seed in rank["rounds"][0]["episode_seeds"]]
    assert episode_seeds == single["rounds"][2]["episode_seeds"]
    for name, value in single["state"].items():
        torch.testing.assert_close(ranks[0]["state"][name], value, atol=1e-4, rtol=1e-3)


def test_a_run_resumes_with_another_number_of_ranks(runs: tuple[Path, Path, str]) -> None:
    one, two, _ = runs
    overrides = [*TASK, "environment.envs=8", "rounds=3"]
    train(compose_config("run", overrides), two, Console(quiet=True), overrides)
    resumed, single = load_record(two), load_record(one)
    assert resumed["rounds"][0]["episode_seeds"] == single["rounds"][2]["episode_seeds"]
    for name, value in single["state"].items():
        torch.testing.assert_close(resumed["state"][name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0."),
        torch.distributed.DistNetworkError("failed to recv"),
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5731"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_only_communication_errors_of_several_ranks_are_a_lost_rank(
    error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)) as raised, detect_lost_rank():
        raise error
    assert raised.value is error, "a single process has lost no rank"
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(RankLostError, match="another process of this run has ended"), detect_lost_rank():
        raise error
    with pytest.raises(RuntimeError, match=r"^out of memory$"), detect_lost_rank():
        raise RuntimeError("out of memory")


def test_a_run_whose_first_rank_is_killed_ends_without_a_hang(tmp_path: Path) -> None:
    killed = start(
        tmp_path, *TASK, "environment.envs=2", "trainer=ddp", "rounds=3", "+callbacks.recorder.killed_rank=0"
    )
    printed = wait_for_output(killed)  # also of the other rank, which has the same pipe
    assert killed.returncode != 0
    assert "another process of this run has ended" in printed


def test_a_sweep_with_a_killed_rank_ends_and_reports_its_jobs(tmp_path: Path) -> None:
    overrides = ("environment.envs=2", "trainer=ddp", "rounds=3", "+callbacks.recorder.killed_rank=1", "seed=0,1")
    killed = start(tmp_path, "-m", *TASK, *overrides, f"hydra.sweep.dir={tmp_path}")
    printed = wait_for_output(killed)
    assert killed.returncode != 0
    is_detected = printed.count("another process of this run has ended") == 3 and "0 of 1 jobs finished" in printed
    # Lightning checks every five seconds whether a rank has died, and then kills the others
    assert is_detected or "terminated with code -9" in printed
    assert not (tmp_path / "1").exists()  # the second job needs that rank
