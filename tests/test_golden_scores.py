"""Recorded scores of two short runs: a change of names or structure must not change what a run computes.

The last bits of training depend on the vector instructions of the processor, so there is a record for each kind.
After an intended change record them again, `python -m tests.test_golden_scores`, remove the other records, and add a
line to CHANGELOG.md.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper.config import compose_config
from esper.training import train

GOLDEN = Path(__file__).parent / "golden_scores.json"
CAPABILITY = torch.backends.cpu.get_cpu_capability()  # such as AVX2
TOLERANCE = 1e-5  # relative; a library may change the order of a sum
COMMANDS = {
    "oracle": ["+experiment=oracle", "rounds=6"],
    "quickstart": ["+experiment=quickstart", "rounds=2", "environment.envs=2", "environment.workers=0"],
}
METRICS = ("episode/score", "episode/return", "episode/growth", "validation/sampled_score", "validation/greedy_score")


def round_scores(overrides: list[str], directory: Path) -> list[dict[str, float]]:
    train(compose_config("run", overrides), directory, Console(quiet=True))
    rounds = [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in METRICS if name in line} for line in rounds]


@pytest.mark.parametrize("name", COMMANDS)
def test_round_scores_equal_the_recorded_ones(name: str, tmp_path: Path) -> None:
    records = json.loads(GOLDEN.read_text())
    if CAPABILITY not in records:
        pytest.skip(f"no scores were recorded on a processor with {CAPABILITY}")
    recorded = records[CAPABILITY][name]
    scores = round_scores(COMMANDS[name], tmp_path / "run")
    assert len(scores) == len(recorded)
    for now, before in zip(scores, recorded, strict=True):
        assert now == pytest.approx(before, rel=TOLERANCE)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in the tests: the order of sums differs with several
    with tempfile.TemporaryDirectory() as directory:
        scores = {name: round_scores(overrides, Path(directory) / name) for name, overrides in COMMANDS.items()}
    GOLDEN.write_text(json.dumps({**json.loads(GOLDEN.read_text()), CAPABILITY: scores}, indent=2) + "\n")
