"""Hostile overrides: each must build, or end in one sentence.

The test suite tries some. Try more by hand, in one process:

    python -m tests.fuzz_configuration 5000
"""

import random
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from esper.config import build_vector_env, check_training_config, compose_config, describe_error, flatten
from esper.config.loggers import build_loggers, check_loggers
from esper.data import DataError
from esper.ppo import DivergedError
from esper.training import build_callbacks, build_module, build_trainer, train
from tests.fixtures_compose import quick_composition

EXPERIMENTS = ("quickstart", "oracle")
SMALL = {
    "quickstart": ("data.train=200", "data.validation=100", "data.test=100", "environment.workers=0"),
    "oracle": (),
}
HOSTILE = (
    "null", "true", "false", "0", "-1", "1", "2", "3.5", "-0.5", "1e-30", "1e30", "-1e30", "inf", "-inf", "nan",
    "100000000000000000000000000000000", "''", "abc", "'ü'", "'a b'", "'\\n'", "'[1'", "a.b.c", "/dev/null/x",
    "${seed}", "${nothing}", "${rounds}", "???", "[]", "[1,2]", "[a]", "[null]", "[[]]", "{}", "{a:1}",
    "{a:{b:[1]}}", "{1:2}", "{_target_:esper.nothing}", "{_target_:builtins.dict}", "esper.ppo.PPOSettings",
    "cuda", "32", "'32'", "0x10",
)  # fmt: skip
ERRORS = (ValueError, DataError, DivergedError)


@cache
def keys(experiment: str) -> tuple[str, ...]:
    """Every key of an experiment's configuration: of values, and of the nodes above them."""
    flat = flatten(compose_config("run", [f"+experiment={experiment}"]))
    nodes = {".".join(key.split(".")[:count]) for key in flat for count in range(1, key.count(".") + 1)}
    return tuple(sorted({*flat, *nodes}))


def attempt(experiment: str, override: str, *, run: bool = False) -> str | None:
    """The message that refuses an override; None if the configuration can be built, or trained with if `run`."""
    overrides = [f"+experiment={experiment}", *SMALL[experiment], override, *(["+debug=fast"] if run else [])]
    with tempfile.TemporaryDirectory() as directory:
        try:
            config = compose_config("run", overrides)
            if run:
                train(config, Path(directory), Console(quiet=True))
            else:
                build_all(config, Path(directory))
        except (HydraException, OmegaConfBaseException) as error:
            return describe_error(error, "run", overrides)
        except ERRORS as error:
            return str(error)
    return None


def build_all(config: DictConfig, directory: Path) -> None:
    """Build everything that a run builds before its first round."""
    check_training_config(config)
    check_loggers(config)
    env = build_vector_env(config)
    try:
        build_module(config, env)
        callbacks = build_callbacks(config, directory, Console(quiet=True), env)
        build_trainer(config, directory, callbacks, build_loggers(config, directory, 0, 0))
    finally:
        env.close()


def is_sentence(message: str | None) -> bool:
    return message is None or (len(message.strip()) > 0 and "\n" not in message)


def main(count: int, rng_seed: int = 0) -> int:
    rng, failures, refused = random.Random(rng_seed), 0, 0
    for done in range(count):
        if done % 500 == 0:
            print(f"{done} of {count}", flush=True)
        experiment = rng.choice(EXPERIMENTS)
        override = f"{rng.choice(keys(experiment))}={rng.choice(HOSTILE)}"
        try:
            message = attempt(experiment, override)
        except Exception:  # the purpose of the script is to find them
            message = traceback.format_exc()
        refused += message is not None
        if not is_sentence(message):
            failures += 1
            print(f"+experiment={experiment} {override}\n{message}", flush=True)
    print(f"{count} overrides: {refused} refused, {count - refused - failures} built, {failures} crashed")
    return 1 if failures else 0


if __name__ == "__main__":
    with quick_composition():
        sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
