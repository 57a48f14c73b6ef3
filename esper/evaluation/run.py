"""One evaluation: every arm on every episode seed, then the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from esper.checkpoints.resume import save_config
from esper.evaluation.comparison import Comparison
from esper.evaluation.output import read_provenance, write_results


def evaluate(
    config: DictConfig, directory: Path, console: Console, command: str = "", overrides: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run every arm on every episode seed; records and report go into `directory`. Returns the figures of each arm.

    `overrides` are those that the configuration was composed from, for a later resume.
    """
    comparison = Comparison(config, directory)
    if overrides is not None:
        save_config(config, directory, overrides)
    _print_header(comparison, console)
    columns = (TextColumn("{task.description:>10}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    selector = config.export
    try:
        with Progress(*columns, *times, console=console, transient=True) as progress:
            comparison.run(progress)
    except KeyboardInterrupt:
        console.print("interrupted; finished episodes are kept; resume with")
        console.print(f"  python -m esper.evaluate resume={directory}", soft_wrap=True)
        selector = None
    commands = [*read_provenance(directory).get("commands", []), command]
    found = write_results(comparison.store.latest, comparison.provenance(commands), directory, console)
    if selector is not None:
        path, line = comparison.export(selector)
        grown = ", ".join(f"{blueprint} in {slot}" for slot, (blueprint, _) in line.fossils.items()) or "no seed"
        summary = f"score {line.score:.2f}, {line.parameters:,.0f} parameters, {grown}"
        console.print(f"{path}: network of {line.arm} on episode seed {line.episode_seed}: {summary}", soft_wrap=True)
    comparison.environment.close()
    return found


def _print_header(comparison: Comparison, console: Console) -> None:
    environment, store = comparison.environment, comparison.store
    episodes = f"{comparison.config.episodes} episodes of {environment.steps} steps"
    console.print(f"{environment.data.name}, {episodes} for each of {', '.join(comparison.arms)}")
    console.print(f"-> {comparison.directory}", soft_wrap=True)
    for trained in comparison.controllers:
        trained_for = f"after {trained.info.rounds} rounds, {comparison.mode(trained)}"
        console.print(f"ppo {trained_for}, {trained.label}", soft_wrap=True)
    for remark in comparison.remarks():
        if remark.startswith("Transfer"):
            console.print(remark, soft_wrap=True)
    if store.latest:
        console.print(f"{len(store.latest)} episodes are finished already")
