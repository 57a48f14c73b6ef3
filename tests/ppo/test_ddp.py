"""Two processes that learn together, on one machine, by gloo."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from esper.config import compose_config
from esper.records import read_rounds
from esper.training import train

pytestmark = pytest.mark.xdist_group("ranks")  # what they share is made once

TASK = (
    "+experiment=oracle", "collector.warmup=4", "ppo.epochs=3", "validate_every=0",
    "+callbacks.witness._target_=tests.ppo.fixtures_ranks.Witness",
)  # fmt: skip
TIME = 150  # seconds that no run here takes


def start(directory: Path, *overrides: str) -> "subprocess.Popen[str]":
    place = [] if "-m" in overrides else [f"hydra.run.dir={directory}"]
    command = [sys.executable, "-m", "esper.run", *overrides, *place]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def told(process: "subprocess.Popen[str]") -> str:
    """What a process has printed until its end."""
    return process.communicate(timeout=TIME)[0]


def witnessed(directory: Path, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(directory / f"rank{rank}.pt", weights_only=True)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """One process with eight environments for three rounds, and two with four each for two; what the latter print."""
    root = tmp_path_factory.mktemp("ranks")
    both = start(root / "both", *TASK, "environment.envs=4", "trainer=ddp", "rounds=2")
    (root / "alone").mkdir()
    alone = compose_config("run", [*TASK, "environment.envs=8", "rounds=3"])
    train(alone, root / "alone", Console(quiet=True))
    printed = told(both)
    assert both.returncode == 0, printed
    return root / "alone", root / "both", printed


def test_both_ranks_end_with_the_same_weights_and_statistics(runs: tuple[Path, Path, str]) -> None:
    first, second = (witnessed(runs[1], rank)["state"] for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_two_ranks_play_what_one_process_would(runs: tuple[Path, Path, str]) -> None:
    alone, world_size = witnessed(runs[0]), [witnessed(runs[1], rank) for rank in range(2)]
    for number in range(2):
        parts = [rank["rounds"][number] for rank in world_size]
        assert parts[0]["seeds"] + parts[1]["seeds"] == alone["rounds"][number]["seeds"]
        for name in ("action", "log_prob"):
            both = torch.cat([part[name] for part in parts])
            torch.testing.assert_close(both, alone["rounds"][number][name], atol=1e-5, rtol=1e-5)


def test_two_ranks_reach_the_statistics_of_one_process(runs: tuple[Path, Path, str]) -> None:
    for number in range(2):
        mine, theirs = (witnessed(run)["rounds"][number]["statistics"] for run in (runs[1], runs[0]))
        assert len(theirs) == 9  # mean, variance and count of what is seen of hosts and of slots, and of returns
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_only_one_rank_prints_and_writes(runs: tuple[Path, Path, str]) -> None:
    _, both, printed = runs
    assert printed.count("round 2/2") == 1
    assert [line["round"] for line in read_rounds(both / "rounds.jsonl")] == [1, 2]
    single = read_rounds(runs[0] / "rounds.jsonl")[1]
    line = read_rounds(both / "rounds.jsonl")[1]
    assert line["decisions"] == single["decisions"]
    for name in ("episode/score", "policy/kl", "losses/explained_variance", "policy/advantage_std"):
        assert line[name] == pytest.approx(single[name], rel=1e-3, abs=1e-5)


def test_a_run_goes_on_with_another_number_of_ranks(runs: tuple[Path, Path, str]) -> None:
    alone, both, _ = runs
    overrides = [*TASK, "environment.envs=8", "rounds=3"]
    train(compose_config("run", overrides), both, Console(quiet=True), overrides)
    mine, theirs = witnessed(both), witnessed(alone)
    assert mine["rounds"][0]["seeds"] == theirs["rounds"][2]["seeds"]
    for name, value in theirs["state"].items():
        torch.testing.assert_close(mine["state"][name], value, atol=1e-4, rtol=1e-3)


def test_a_run_whose_first_rank_is_killed_ends_without_a_hang(tmp_path: Path) -> None:
    killed = start(tmp_path, *TASK, "environment.envs=2", "trainer=ddp", "rounds=3", "+callbacks.witness.dies=0")
    printed = told(killed)  # also of the rank that is left, which holds the same pipe
    assert killed.returncode != 0
    assert "another process of this run is gone" in printed


def test_a_sweep_one_of_whose_ranks_is_killed_ends_and_tells_what_became_of_its_jobs(tmp_path: Path) -> None:
    dying = ("environment.envs=2", "trainer=ddp", "rounds=3", "+callbacks.witness.dies=1", "seed=0,1")
    killed = start(tmp_path, "-m", *TASK, *dying, f"hydra.sweep.dir={tmp_path}")
    printed = told(killed)
    assert killed.returncode != 0
    in_time = printed.count("another process of this run is gone") == 3 and "0 of 1 jobs finished" in printed
    assert in_time or "terminated with code -9" in printed  # Lightning looks every five seconds, and ends the rest
    assert not (tmp_path / "1").exists()  # which would have needed that rank
