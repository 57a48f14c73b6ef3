"""Results on many tasks on the screen: the mean score of each arm on each task, and tables over all tasks."""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.evaluation.across_tasks import are_comparable, best_rule, group_by_split, summarise_arms
from esper.evaluation.document import ReportTable
from esper.evaluation.provenance import Provenance
from esper.evaluation.results import TaskResults
from esper.evaluation.task_sections import describe_best_rule, group_tables

MEAN_COLUMNS = 7  # arms beside each other on the screen
REPORT_COLUMNS = ("over controllers", "P(improvement)")  # that the screen has no place for


def print_task_means(tasks: Sequence[TaskResults], main: str, provenance: Provenance, console: Console) -> None:
    """Print the tables of each split of tasks; `main` is the reference.

    Scores of different kinds are not averaged.
    """
    groups = group_by_split(tasks)
    for title, own in groups.items():
        is_comparable, heading = are_comparable(own), f"{title}: " if len(groups) > 1 else ""
        arms = list(dict.fromkeys(name for task in own for name in task.arms))
        for start in range(0, len(arms), MEAN_COLUMNS):
            some = arms[start : start + MEAN_COLUMNS]
            console.print(_mean_table(own, some, f"{heading}mean scores by task", with_mean=is_comparable))
        if not is_comparable:
            continue
        for name, table in group_tables(own, main, provenance):
            if "rent" in name:
                continue  # too wide for a screen
            has_intervals = any("[" in cell for row in table.rows for cell in row)
            shown = drop_columns(table, REPORT_COLUMNS)
            print_table(shown, f"{heading}{name}{' [95 % intervals]' if has_intervals else ''}", console)
        best = best_rule(summarise_arms(own, provenance.oracle))
        if best is not None and own[0].task_split == "train":
            console.print(describe_best_rule(best), soft_wrap=True)


def _mean_table(tasks: Sequence[TaskResults], arms: Sequence[str], title: str, *, with_mean: bool) -> Table:
    means = {task.title: {name: task.summarise(name).mean.value for name in task.arms} for task in tasks}
    table = empty_table(title, ("task", *arms))
    for task, by_arm in sorted(means.items()):
        table.add_row(task, *(f"{by_arm[name]:.2f}" if name in by_arm else "-" for name in arms))
    if with_mean:
        table.add_section()
        totals = [[by_arm[name] for by_arm in means.values() if name in by_arm] for name in arms]
        table.add_row("mean", *(f"{fmean(scores):.2f}" if scores else "-" for scores in totals))
    return table


def drop_columns(table: ReportTable, names: Sequence[str]) -> ReportTable:
    """The table without some columns."""
    kept = [column for column, name in enumerate(table.header) if name not in names]
    rows = [[row[column] for column in kept] for row in table.rows]
    return ReportTable([table.header[column] for column in kept], rows)


def print_table(table: ReportTable | None, title: str, console: Console) -> None:
    """Print a table of the report; nothing for None."""
    if table is None:
        return
    shown = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for column, is_numeric in zip(table.header, table.numeric_columns, strict=True):
        shown.add_column(column, justify="right" if is_numeric else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(escape, row))
    console.print(shown)


def empty_table(title: str, columns: Sequence[str]) -> Table:
    """A table with a title; columns of numbers are aligned to the right."""
    shown = Table(
        title=title, title_justify="left", caption_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True
    )
    for column in columns:
        is_text = column in ("arm", "task")
        shown.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return shown
