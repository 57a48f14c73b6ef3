"""What telemetry costs, as a share of a run's wall time.

    python benchmarks/telemetry.py                        about three minutes on two cores; nothing is downloaded
    python benchmarks/telemetry.py +experiment=cifar_ppo rounds=10        on another run

Every hook of every callback, and everything that watches rounds, is timed while a run goes on as configured.
A comparison of runs with and without telemetry could not tell: rounds of one run differ by more.
"""

import sys
import tempfile
import time
from collections import defaultdict
from functools import wraps
from pathlib import Path
from typing import Any

from rich.console import Console

import esper.run as run
from esper.config import compose_config

HOOKS = ("on_", "round_", "step_", "setup", "teardown")
NOT_TELEMETRY = {"Checkpoints"}


def timed(thing: Any, spent: dict[str, float]) -> Any:
    """Let a thing's hooks add up their time under its name."""
    for name in dir(thing):
        if name.startswith(HOOKS) and callable(getattr(thing, name)):
            setattr(thing, name, _timed(getattr(thing, name), type(thing).__name__, spent))
    return thing


def _timed(hook: Any, name: str, spent: dict[str, float]) -> Any:
    @wraps(hook)
    def call(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return hook(*given, **named)
        finally:
            spent[name] += time.perf_counter() - began

    return call


def main() -> None:
    run.prepare_process()
    overrides = sys.argv[1:] or ["+experiment=quickstart", "rounds=20"]
    spent: dict[str, float] = defaultdict(float)
    build_callbacks, round_listeners = run.build_callbacks, run.watchers_of
    run.build_callbacks = lambda *given: [timed(each, spent) for each in build_callbacks(*given)]
    run.watchers_of = lambda callbacks: [
        each if each in callbacks else timed(each, spent) for each in round_listeners(callbacks)
    ]
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        run.train(compose_config("run", overrides), Path(directory), Console(quiet=True))
        total = time.perf_counter() - began
    told = {name: seconds for name, seconds in spent.items() if name not in NOT_TELEMETRY}
    for name, seconds in sorted(told.items(), key=lambda pair: -pair[1]):
        print(f"{name:16} {seconds:7.2f} s  {seconds / total:6.2%}")
    print(f"telemetry took {sum(told.values()) / total:.2%} of {total:.0f} s ({' '.join(overrides)})")


if __name__ == "__main__":
    main()
