"""One evaluation: every arm on every episode seed, then the report."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from esper.checkpoints.resume import save_config
from esper.environment import WorkerLostError
from esper.evaluation.comparison import Comparison
from esper.evaluation.output import write_results
from esper.evaluation.provenance import read_provenance


def evaluate(
    config: DictConfig, directory: Path, console: Console, command: str = "", overrides: Sequence[str] | None = None
) -> dict[str, dict[str, Any]]:
    """Run every arm on every episode seed, and write the report; returns each task's results by arm.

    Arguments:
        config: of `esper.evaluate`
        directory: of records and report; episodes in it do not run again
        console: where tables are printed
        command: that was typed, for the report
        overrides: that the configuration was composed from, saved for a later resume; None saves nothing
    """
    comparison = Comparison(config, directory)
    if overrides is not None:
        save_config(config, directory, overrides)
    _print_header(comparison, console)
    with closing(comparison.environment):
        is_complete = _run_arms(comparison, console)
        provenance = comparison.provenance([*read_provenance(directory).commands, command])
        provenance = replace(provenance, primary=config.primary)
        results = write_results(comparison.store.latest, provenance, directory, console)
        if is_complete and config.export is not None:
            _export_network(comparison, config.export, console)
    return results


def _run_arms(comparison: Comparison, console: Console) -> bool:
    """Run all episodes that are missing; returns whether they were not interrupted."""
    columns = (TextColumn("{task.description:>10}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    resume = f"python -m esper.evaluate resume={comparison.directory}"
    try:
        with Progress(*columns, *times, console=console, transient=True) as progress:
            comparison.run(progress)
    except KeyboardInterrupt:
        console.print("interrupted; finished episodes are saved; resume with")
        console.print(f"  {resume}", soft_wrap=True)
        return False
    except WorkerLostError as error:
        raise ValueError(f"{error}; resume with {resume}") from error
    return True


def _export_network(comparison: Comparison, selector: str | int, console: Console) -> None:
    path, episode = comparison.export_network(selector)
    grown = ", ".join(f"{blueprint} in {slot}" for slot, (blueprint, _) in episode.fossils.items()) or "no seed"
    origin = f"{episode.arm} on episode seed {episode.episode_seed}"
    summary = f"score {episode.score:.2f}, {episode.parameters:,.0f} parameters, {grown}"
    console.print(f"{path}: network of {origin}: {summary}", soft_wrap=True)


def _print_header(comparison: Comparison, console: Console) -> None:
    environment, store = comparison.environment, comparison.store
    episodes = f"{comparison.config.episodes} episodes of {environment.steps} steps"
    console.print(f"{environment.data.name}, {episodes} for each of {', '.join(comparison.arms)}")
    console.print(f"-> {comparison.directory}", soft_wrap=True)
    for trained in comparison.controllers:
        mode = f"after {trained.info.rounds} rounds, {comparison.action_mode(trained)}"
        console.print(f"ppo {mode}, {trained.label}", soft_wrap=True)
    for remark in comparison.collect_remarks():
        if remark.startswith("Transfer"):
            console.print(remark, soft_wrap=True)
    if store.latest:
        console.print(f"{len(store.latest)} episodes are finished already")
