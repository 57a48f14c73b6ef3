"""The cost of telemetry, as a share of a run's wall time.

    python benchmarks/telemetry.py                        about a minute on two cores; nothing is downloaded
    python benchmarks/telemetry.py +experiment=cifar_ppo rounds=10        on another run

Times every hook of every callback and of every round listener during a normal run. A comparison of runs with and
without telemetry would not show the cost: rounds of the same run differ by more.
"""

import sys
import tempfile
import time
from collections import defaultdict
from functools import wraps
from pathlib import Path
from typing import Any

from rich.console import Console

from esper import training
from esper.config import compose_config

HOOKS = ("on_", "setup", "teardown")
NOT_TELEMETRY = {"CheckpointCallback"}


def time_hooks(callback: Any, seconds: dict[str, float]) -> Any:
    """Make a callback's hooks add their time to `seconds` of its class."""
    for name in dir(callback):
        if name.startswith(HOOKS) and callable(getattr(callback, name)):
            setattr(callback, name, _time_hook(getattr(callback, name), type(callback).__name__, seconds))
    return callback


def _time_hook(hook: Any, name: str, seconds: dict[str, float]) -> Any:
    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return hook(*args, **kwargs)
        finally:
            seconds[name] += time.perf_counter() - started

    return call


def main() -> None:
    training.configure_process()
    overrides = sys.argv[1:] or ["+experiment=quickstart", "rounds=4"]
    seconds: dict[str, float] = defaultdict(float)
    build_callbacks, round_listeners = training.build_callbacks, training.round_listeners
    training.build_callbacks = lambda *args: [time_hooks(callback, seconds) for callback in build_callbacks(*args)]
    training.round_listeners = lambda callbacks: [
        listener if listener in callbacks else time_hooks(listener, seconds) for listener in round_listeners(callbacks)
    ]
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        training.train(compose_config("run", overrides), Path(directory), Console(quiet=True))
        total = time.perf_counter() - started
    telemetry = {name: spent for name, spent in seconds.items() if name not in NOT_TELEMETRY}
    for name, spent in sorted(telemetry.items(), key=lambda pair: -pair[1]):
        print(f"{name:16} {spent:7.2f} s  {spent / total:6.2%}")
    print(f"telemetry took {sum(telemetry.values()) / total:.2%} of {total:.0f} s ({' '.join(overrides)})")


if __name__ == "__main__":
    main()
