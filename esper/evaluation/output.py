"""Results of finished episodes: a table on the screen, a report, and evaluation.json."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.evaluation.across_tasks import are_comparable, group_by_split
from esper.evaluation.claims import FEW_SEEDS_NOTE, ArmComparison, compare_arms, format_p_value
from esper.evaluation.document import format_interval, write_report
from esper.evaluation.provenance import EVALUATION_FILE, Provenance
from esper.evaluation.results import RESULT_METRICS, TaskResults, group_by_task
from esper.evaluation.sections import pick_reference, report_sections
from esper.evaluation.statistics import MIN_UNITS
from esper.evaluation.task_means import empty_table, print_task_means
from esper.evaluation.task_sections import group_numbers
from esper.evaluation.training_runs import TrainingRun, training_table
from esper.files import write_file
from esper.records import EpisodeRecord

PRINT_WIDTH = 120  # columns of output that goes into a file
BRIEF_ABOVE = 6  # tasks; with more, the screen has a row for each, and the report the tables of each
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
    results, is_brief = {}, len(tasks) > BRIEF_ABOVE
    for task in tasks:
        main = pick_reference(task, provenance.reference)
        comparisons = compare_arms([task], main, provenance.primary)
        if not is_brief:
            console.print(_score_table(task, main, comparisons))
            console.print(_cost_table(task))
        results[task.title] = _arm_results(task, main, comparisons)
    if is_brief:
        print_task_means(tasks, pick_reference(tasks[0], provenance.reference), provenance, console)
    if runs:
        console.print(_run_table(runs))
    for remark in provenance.remarks:
        console.print(remark, soft_wrap=True)
    if (
        tasks
        and not is_brief
        and min(len(arm.episode_seeds) for task in tasks for arm in task.arms.values()) < MIN_UNITS
    ):
        console.print(FEW_SEEDS_NOTE, soft_wrap=True)
    across = {
        title: group_numbers(own, pick_reference(own[0], provenance.reference), provenance)
        for title, own in group_by_split(tasks).items()
        if len(own) > 1 and are_comparable(own)
    }
    text = json.dumps({**saved, "tasks": results, **({"across_tasks": across} if across else {})}, indent=2)
    write_file(directory / EVALUATION_FILE, text)
    paths = write_report(directory, *report_sections(tasks, provenance, runs))
    console.print(f"{directory}/{', '.join(path.name for path in paths)}, {EVALUATION_FILE}", soft_wrap=True)
    return results


def _arm_results(task: TaskResults, main: str, comparisons: Sequence[ArmComparison]) -> dict[str, Any]:
    """For each arm: numbers of episodes, the columns of the tables, and the difference from the reference."""
    by_arm: dict[str, Any] = {}
    for name, results in task.arms.items():
        estimates = {title: results.estimate_of(title) for title in RESULT_METRICS}
        summary = task.summarise(name)
        by_arm[name] = {
            "controllers": len(results.checkpoints),
            "seeds": len(results.episode_seeds),
            "episodes": len(results.episodes),
            **{title: None if estimate is None else estimate.to_dict() for title, estimate in estimates.items()},
            "mean": summary.mean.to_dict(),
            "worst_tenth": summary.worst_tenth,
            "failure_rate": summary.failure_rate,
        }
    for one in comparisons:
        by_arm[one.arm]["compared"] = {
            "reference": main,
            **one.gap.to_dict(),
            "p": one.gap.p_value,
            "p_adjusted": one.p_value,
            "is_primary": one.is_primary,
            "reference_is": one.claim,
        }
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


def _score_table(task: TaskResults, main: str, comparisons: Sequence[ArmComparison]) -> Table:
    """One row for each arm, best first."""
    is_short = len(main) <= HEADER_NAME_LENGTH
    title = f"{task.title}: interquartile means [95 % intervals]{'' if is_short else f'; first is {main}'}"
    compared = {one.arm: one for one in comparisons}
    gap_columns = [f"{main if is_short else 'first'} - arm", "p"] if compared else []
    columns = ("arm", "episodes", "score", "mean", "worst tenth", "failures", *gap_columns)
    rows = []
    for name, results in task.arms.items():
        summary, score = task.summarise(name), results.estimate_of("score")
        row = [name, str(len(results.episodes)), format_interval(score), f"{summary.mean.value:.2f}",
               f"{summary.worst_tenth:.2f}", f"{summary.failure_rate:.0%}"]  # fmt: skip
        if one := compared.get(name):
            row += [format_interval(one.gap, "{:+.2f}"), format_p_value(one.p_value) + (" *" if one.is_claim else "")]
        rows.append((0 if score is None else -score.value, row))
    shown = empty_table(title, columns)
    if comparisons:
        scopes = sorted({one.claim.partition(", ")[2] for one in comparisons if one.is_claim} - {""})
        shown.caption = f"p is adjusted for the number of arms; * a difference is claimed{', '.join(['', *scopes])}"
    for _, row in sorted(rows, key=lambda item: item[0]):
        shown.add_row(*row)
    return shown


def _cost_table(task: TaskResults) -> Table:
    """What was measured, without the rent, and what it cost: one row for each arm, in the order of arms."""
    titles = {title: form for title, (_, form, _) in RESULT_METRICS.items() if title != "score"}
    shown = empty_table(f"{task.title}: cost", ("arm", *titles))
    for name, results in task.arms.items():
        estimates = {title: results.estimate_of(title) for title in titles}
        cells = ("-" if (found := estimates[title]) is None else form.format(found.value)
                 for title, form in titles.items())  # fmt: skip
        shown.add_row(name, *cells)
    return shown
