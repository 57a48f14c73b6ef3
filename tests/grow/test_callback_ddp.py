"""Growth with two processes on one machine (gloo)."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures_process import TIMEOUT

pytestmark = pytest.mark.xdist_group("grown ranks")  # so that the run they share is made once


def train(directory: Path, *arguments: str) -> str:
    """What two processes print."""
    directory.mkdir()
    command = [sys.executable, "-m", "tests.grow.train_ranks", str(directory), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def records(directory: Path) -> list[dict[str, Any]]:
    return [torch.load(directory / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("ranks") / "run"
    return directory, train(directory)


def test_both_ranks_take_the_same_decisions_and_stay_equal(run: tuple[Path, str]) -> None:
    first, second = records(run[0])
    assert first["history"] == second["history"]
    assert first["seeds"] == second["seeds"] == ["net.layer2"]
    assert list(first["state"]) == list(second["state"])
    weights = [name for name in first["state"] if "running" not in name]
    assert all(torch.equal(first["state"][name], second["state"][name]) for name in weights)
    grown = [value for name, value in first["state"].items() if name.startswith("esper_slots")]
    assert grown
    assert grown[-1].abs().sum() > 0


def test_gradients_of_new_seeds_are_averaged_over_ranks(run: tuple[Path, str]) -> None:
    first, second = records(run[0])
    assert first["losses"] != second["losses"], "each has its own data"
    for record in (first, second):
        assert all(record["agree"])
        assert all(record["wrapped"])


def test_only_one_rank_prints_and_writes(run: tuple[Path, str]) -> None:
    directory, printed = run
    assert printed.count("planted conv_small in net.layer2") == 1
    assert printed.count("What grew") == 1
    assert len(list(directory.rglob("growth.png"))) == 1


def test_two_ranks_resume_where_they_were(run: tuple[Path, str], tmp_path: Path) -> None:
    train(tmp_path / "again", str(run[0] / "saved" / "epoch=2.ckpt"))
    for before, after in zip(records(run[0]), records(tmp_path / "again"), strict=True):
        assert after["history"] == before["history"]
        weights = [name for name in before["state"] if "running" not in name]
        assert all(torch.equal(after["state"][name], before["state"][name]) for name in weights)
        assert all(after["agree"])
