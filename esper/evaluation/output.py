"""Results of finished episodes: a table on the screen, a report, and evaluation.json."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.evaluation.document import format_interval, write_report
from esper.evaluation.provenance import EVALUATION_FILE, Provenance
from esper.evaluation.results import RESULT_METRICS, TaskResults, group_by_task, paired_values
from esper.evaluation.sections import FEW_SEEDS_NOTE, describe_difference, pick_reference, report_sections
from esper.evaluation.statistics import MIN_UNITS, paired_difference
from esper.evaluation.training_runs import TrainingRun, training_table
from esper.files import write_file
from esper.records import EpisodeRecord

PRINT_WIDTH = 120  # columns of output that goes into a file
HEADER_NAME_LENGTH = 12  # letters of an arm's name that fit the head of a column


def make_console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PRINT_WIDTH)


def write_results(
    episodes: Sequence[EpisodeRecord],
    provenance: Provenance,
    directory: Path,
    console: Console,
    runs: Sequence[TrainingRun] = (),
) -> dict[str, dict[str, Any]]:
    """Write report.md, report.html and evaluation.json, and print the tables; returns each task's results by arm."""
    tasks, remarks = group_by_task(episodes)
    if not tasks and not runs:
        console.print("there are no finished episodes to report")
        return {}
    saved = provenance.to_dict()  # without the remarks of group_by_task, which every reader of the episodes gets again
    provenance = replace(provenance, remarks=list(dict.fromkeys([*provenance.remarks, *remarks])))
    for task in tasks:
        console.print(_arm_table(task, pick_reference(task, provenance.reference)))
    if runs:
        console.print(_run_table(runs))
    for remark in provenance.remarks:
        console.print(remark, soft_wrap=True)
    if tasks and min(len(results.episode_seeds) for task in tasks for results in task.arms.values()) < MIN_UNITS:
        console.print(FEW_SEEDS_NOTE, soft_wrap=True)
    results = {task.title: _arm_results(task, pick_reference(task, provenance.reference)) for task in tasks}
    text = json.dumps({**saved, "tasks": results}, indent=2)
    write_file(directory / EVALUATION_FILE, text)
    paths = write_report(directory, *report_sections(tasks, provenance, runs))
    console.print(f"{directory}/{', '.join(path.name for path in paths)}, {EVALUATION_FILE}", soft_wrap=True)
    return results


def _arm_results(task: TaskResults, main: str) -> dict[str, Any]:
    """For each arm: numbers of episodes, the columns of the results table, and the difference from the reference."""
    by_arm: dict[str, Any] = {}
    for name, results in task.arms.items():
        estimates = {title: results.estimate_of(title) for title in RESULT_METRICS}
        by_arm[name] = {
            "controllers": len(results.checkpoints),
            "seeds": len(results.episode_seeds),
            "episodes": len(results.episodes),
            **{title: None if estimate is None else asdict(estimate) for title, estimate in estimates.items()},
        }
        mine, theirs = paired_values([task.arms[main]], [results])
        if name != main and mine:
            gap = paired_difference(mine, theirs)
            outcome = describe_difference(gap, mine[0].shape[-1])
            by_arm[name]["compared"] = {"reference": main, **asdict(gap), "reference_is": outcome}
    return by_arm


def _run_table(runs: Sequence[TrainingRun]) -> Table:
    """One row for each training run."""
    shown = Table(title="training", title_justify="left", box=SIMPLE, pad_edge=False)
    table = training_table(runs)
    for column, is_numeric in zip(table.header, table.numeric_columns, strict=True):
        shown.add_column(column, justify="right" if is_numeric else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(escape, row))
    return shown


def _arm_table(task: TaskResults, main: str) -> Table:
    """One row for each arm, best first."""
    is_short = len(main) <= HEADER_NAME_LENGTH
    title = f"{task.title}: interquartile means [95 % intervals]{'' if is_short else f'; first is {main}'}"
    shown = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    gap_column = [f"{main if is_short else 'first'} - arm"] if len(task.arms) > 1 else []
    for column in ("arm", "episodes", *RESULT_METRICS, *gap_column):
        is_text = column == "arm"
        shown.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    rows = []
    for name, results in task.arms.items():
        estimates = {column: results.estimate_of(column) for column in RESULT_METRICS}
        cells = ["-" if (estimate := estimates[column]) is None else form.format(estimate.value)
                 for column, (_, form, _) in RESULT_METRICS.items() if column != "score"]  # fmt: skip
        mine, theirs = paired_values([task.arms[main]], [results])
        gap = paired_difference(mine, theirs) if name != main and mine else None
        gap_cell = ["" if gap is None else format_interval(gap, "{:+.2f}")] if gap_column else []
        score = estimates["score"]
        row = [name, str(len(results.episodes)), format_interval(score), *cells, *gap_cell]
        rows.append((0 if score is None else -score.value, row))
    for _, row in sorted(rows, key=lambda item: item[0]):
        shown.add_row(*row)
    return shown
