"""One evaluation: every arm on every episode seed, then the report."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from esper.checkpoints.resume import save_config
from esper.config import task_specs
from esper.environment import WorkerLostError
from esper.evaluation.comparison import Comparison
from esper.evaluation.frontier import frontier_costs, frontier_table, write_frontier
from esper.evaluation.output import BRIEF_ABOVE, write_results
from esper.evaluation.provenance import read_provenance
from esper.evaluation.regret import lr_table, regret_table, search_table
from esper.evaluation.results import TaskResults, group_by_task
from esper.evaluation.selection import check_arms
from esper.evaluation.task_means import print_table


@dataclass(frozen=True)
class Evaluation:
    """A finished or interrupted comparison."""

    results: dict[str, dict[str, Any]]  # of each task by arm
    tasks: list[TaskResults]
    is_complete: bool  # False after an interrupt


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
    if config.budgets is not None:
        return evaluate_budgets(config, directory, console, command, overrides)
    comparison = Comparison(config, directory)
    if overrides is not None:
        save_config(config, directory, overrides)
    return _evaluate(comparison, console, command, directory).results


def evaluate_budgets(
    config: DictConfig, directory: Path, console: Console, command: str = "", overrides: Sequence[str] | None = None
) -> dict[str, dict[str, Any]]:
    """The same comparison with each of several budgets, and score against cost over all of them."""
    configs = budget_configs(config)
    for own in configs.values():
        check_arms(own)
    results: dict[str, dict[str, Any]] = {}
    tasks: dict[str, dict[float, TaskResults]] = {}
    for number, (budget, own) in enumerate(configs.items()):
        part = directory / f"budget_{budget:g}"
        part.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(own, part)
        if overrides is not None and not number:
            save_config(config, directory, overrides)
        console.print(f"budget of {budget:g} GFLOPs")
        evaluation = _evaluate(comparison, console, command, directory)
        results |= {f"{title}, {budget:g} GFLOPs": arms for title, arms in evaluation.results.items()}
        for task in evaluation.tasks:
            tasks.setdefault(task.title, {})[budget] = task
        if not evaluation.is_complete:
            return results
    _print_frontier(tasks, list(configs), directory, console)
    return results


def budget_configs(config: DictConfig) -> dict[float, DictConfig]:
    """The configuration of the comparison with each budget."""
    budgets = list(config.budgets)
    if "budget" not in config.environment:
        raise ValueError(f"budgets={budgets}: must be null with a number of batches; environment=budget has budgets.")
    if not budgets or not all(budget > 0 for budget in budgets) or len(set(budgets)) < len(budgets):
        raise ValueError(f"budgets={budgets}: must be different numbers of GFLOPs above 0, such as [45,150,450].")
    if any(spec.budget_batches is not None for spec in task_specs(config)):
        raise ValueError(f"budgets={budgets}: must be null with tasks={config.tasks.name}, whose tasks have their own.")
    configs = {}
    for budget in sorted(budgets):
        own = copy.deepcopy(config)
        own.budgets = None
        own.environment.budget, own.environment.budget_batches = float(budget), None
        configs[float(budget)] = own
    return configs


def _print_frontier(
    tasks: Mapping[str, Mapping[float, TaskResults]], budgets: Sequence[float], directory: Path, console: Console
) -> None:
    for title, by_budget in tasks.items():
        print_table(frontier_table(frontier_costs(by_budget), budgets), f"{title}: score against budget", console)
    files = write_frontier(tasks, directory)
    console.print(f"{directory}/{', '.join(path.name for path in files)}", soft_wrap=True)


def _evaluate(comparison: Comparison, console: Console, command: str, resumed: Path) -> Evaluation:
    """Run a comparison and write its report; `resumed` is the directory that a resume names."""
    directory, config = comparison.directory, comparison.config
    _print_header(comparison, console)
    with closing(comparison.environment):
        is_complete = _run_arms(comparison, console, resumed)
        commands = [*read_provenance(directory).commands, command]
        provenance = replace(comparison.provenance(commands), primary=config.primary)
        results = write_results(comparison.store.latest, provenance, directory, console)
        tasks, _ = group_by_task(comparison.store.latest)
        for task in tasks if len(tasks) <= BRIEF_ABOVE else ():
            print_table(regret_table(task, provenance.oracle), f"{task.title}: regret", console)
            print_table(lr_table([task]), f"{task.title}: learning rates", console)
        print_table(search_table(provenance.searches), "searches", console)
        if is_complete and config.export is not None:
            _export_network(comparison, config.export, console)
    return Evaluation(results, tasks, is_complete)


def _run_arms(comparison: Comparison, console: Console, resumed: Path) -> bool:
    """Run all episodes that are missing; returns whether they were not interrupted."""
    columns = (TextColumn("{task.description:>10}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    resume = f"python -m esper.evaluate resume={resumed}"
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
    console.print(f"{environment.name}, {episodes} for each of {', '.join(comparison.arms)}")
    console.print(f"-> {comparison.directory}", soft_wrap=True)
    for trained in comparison.controllers:
        mode = f"after {trained.info.rounds} rounds, {comparison.action_mode(trained)}"
        console.print(f"ppo {mode}, {trained.label}", soft_wrap=True)
    for remark in comparison.collect_remarks():
        if remark.startswith("Transfer"):
            console.print(remark, soft_wrap=True)
    if store.latest:
        console.print(f"{len(store.latest)} episodes are finished already")
