"""python -m esper.evaluate: compare controllers on the same episodes."""

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from esper.comparison import Comparison
from esper.config import CONF, entry
from esper.data import DataError
from esper.evaluation.conclude import conclude, told
from esper.learners import absolute, as_trained, beside, named
from esper.resume import EVALUATION, key_of, overridden, prepared, save
from esper.run import take_back

WIDTH = 120  # columns of what is printed into a file


def evaluate(
    config: DictConfig, directory: Path, console: Console, command: str = "", overrides: Sequence[str] | None = None
) -> dict[str, Any]:
    """Play every arm on every seed; records and report go into `directory`. Gives the figures of each arm.

    `overrides` are all that the configuration was made from, for a later resume.
    """
    comparison = Comparison(config, directory)
    if overrides is not None:
        save(config, directory, overrides)
    environment, played = comparison.environment, comparison.played
    arms = ", ".join(comparison.arms)
    console.print(
        f"{environment.data.name}, {config.episodes} episodes of {environment.steps} steps for each of {arms}"
    )
    console.print(f"-> {directory}", soft_wrap=True)
    for learner in comparison.learners:
        how = f"after {learner.about['rounds']} rounds, {comparison.mode(learner)}"
        console.print(f"ppo {how}, {learner.label}", soft_wrap=True)
    for change in (remark for remark in comparison.remarks() if remark.startswith("Transfer")):
        console.print(change, soft_wrap=True)
    if played.lines:
        console.print(f"{len(played.lines)} episodes are there already")
    columns = (TextColumn("{task.description:>10}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    wanted = config.export
    try:
        with Progress(*columns, *times, console=console, transient=True) as progress:
            comparison.play(progress)
    except KeyboardInterrupt:
        console.print("interrupted; what is finished is kept; go on with")
        console.print(f"  python -m esper.evaluate resume={directory}", soft_wrap=True)
        wanted = None
    commands = [*told(directory).get("commands", []), command]
    found = conclude(played.lines, comparison.source(commands), directory, console)
    if wanted is not None:
        path, line = comparison.export(wanted)
        grown = ", ".join(f"{blueprint} in {slot}" for slot, (blueprint, _) in line["fossils"].items()) or "no seed"
        ended = f"score {line['score']:.2f}, {line['parameters']:,.0f} parameters, {grown}"
        console.print(f"{path}: the network of {line['controller']} on seed {line['seed']}: {ended}", soft_wrap=True)
    environment.close()
    return found


def unspoilt(arguments: Sequence[str]) -> None:
    """Refuse a directory that holds another evaluation, before Hydra writes into it."""
    typed = {key_of(argument): argument.partition("=")[2].strip("'") for argument in arguments}
    directory = Path(typed.get("hydra.run.dir", ""))
    if "hydra.run.dir" in typed and "resume" not in typed and (directory / EVALUATION.file).exists():
        raise ValueError(
            f"hydra.run.dir={directory}: holds an evaluation already; go on with resume={directory}, or choose another."
        )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="evaluate")
def main(config: DictConfig) -> None:
    torch.set_num_threads(1)  # environments run in threads of their own
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    running = HydraConfig.get()
    directory, overrides = Path(running.runtime.output_dir), list(running.overrides.task)
    resumed = config.resume is not None
    try:
        if resumed:
            config, changes = overridden(config, directory, EVALUATION, overrides)
            for change in changes:
                console.print(f"changed     {change}", soft_wrap=True)
        else:
            config = as_trained(config, overrides, named(config.ckpt))
        evaluate(config, directory, console, f"python {shlex.join(sys.orig_argv[1:])}", overrides)
    except (ValueError, DataError) as error:
        if not resumed:
            take_back(directory)
        sys.exit(str(error))


def cli() -> None:
    try:
        arguments = prepared(beside(absolute(sys.argv[1:])), EVALUATION)
        unspoilt(arguments)
    except ValueError as error:
        sys.exit(str(error))
    sys.argv[1:] = arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    entry(main, "evaluate")


if __name__ == "__main__":
    cli()
