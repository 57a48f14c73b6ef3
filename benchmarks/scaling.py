"""Whole runs: decisions per second with threads, workers and ranks, compared with the ideal.

    python benchmarks/scaling.py                      about ten minutes on two cores; nothing is downloaded
    python benchmarks/scaling.py --rounds 4 --repeats 1

All variants run the same eight episodes per round. They take turns, and medians over rounds are compared, without the
first round of each run. The ideal of two cores is twice one thread.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from esper.records import read_rounds

TASK = ("+experiment=quickstart", "validate_every=0", "callbacks.dashboard=null", "logger=none")
VARIANTS = {
    "1 thread": ("environment.envs=8", "environment.workers=0", "environment.threads=1"),
    "2 threads": ("environment.envs=8", "environment.workers=0", "environment.threads=2"),
    "2 workers": ("environment.envs=8", "environment.workers=2"),
    "2 ranks, 1 thread each": ("environment.envs=4", "environment.workers=0", "environment.threads=1", "trainer=ddp"),
}
CORES = dict(zip(VARIANTS, (1, 2, 2, 2), strict=True))


def run_variant(overrides: tuple[str, ...], rounds: int) -> list[dict[str, float]]:
    """The metrics of all rounds after the first."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "esper.run",
            *TASK,
            *overrides,
            f"rounds={rounds}",
            f"hydra.run.dir={directory}",
        ]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return read_rounds(Path(directory) / "rounds.jsonl")[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.repeats):
        for name, overrides in VARIANTS.items():
            rounds[name] += run_variant(overrides, arguments.rounds)
    rates = {name: median(line["time/decisions_per_second"] for line in lines) for name, lines in rounds.items()}
    base = next(iter(rates.values()))
    for name, rate in rates.items():
        update = median(line["time/update"] for line in rounds[name])
        seconds = median(line["time/environment"] for line in rounds[name])
        speed = f"{rate / base:5.2f} x one thread, {rate / base / CORES[name]:.2f} of the ideal"
        print(f"{name:24} {speed}; an update takes {update / seconds:.1%} of the time in the environment")


if __name__ == "__main__":
    main()
