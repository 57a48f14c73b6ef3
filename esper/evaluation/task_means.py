"""Results on many tasks in two tables: the mean score of each arm on each task, and differences over all tasks."""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from esper.evaluation.claims import compare_arms, format_p_value
from esper.evaluation.document import format_interval
from esper.evaluation.results import TaskResults


def print_task_means(tasks: Sequence[TaskResults], main: str, primary: str | None, console: Console) -> None:
    """Print both tables; `main` is the reference.

    Scores of different kinds are not averaged.
    """
    arms = list(dict.fromkeys(name for task in tasks for name in task.arms))
    means = {task.title: {name: task.summarise(name).mean.value for name in task.arms} for task in tasks}
    table = empty_table("mean scores by task", ("task", *arms))
    for title, by_arm in sorted(means.items()):
        table.add_row(title, *(f"{by_arm[name]:.2f}" if name in by_arm else "-" for name in arms))
    is_comparable = len({(task.is_text, task.split) for task in tasks}) == 1
    if is_comparable:
        table.add_section()
        totals = [[by_arm[name] for by_arm in means.values() if name in by_arm] for name in arms]
        table.add_row("mean", *(f"{fmean(scores):.2f}" for scores in totals))
    console.print(table)
    if is_comparable:
        console.print(_difference_table(tasks, main, primary))


def _difference_table(tasks: Sequence[TaskResults], main: str, primary: str | None) -> Table:
    table = empty_table("all tasks [95 % intervals]", ("arm", "tasks", "episodes", f"{main} - arm", "p"))
    for one in compare_arms(tasks, main, primary):
        p_value = format_p_value(one.p_value) + (" *" if one.is_claim else "")
        gap = format_interval(one.gap, "{:+.2f}")
        table.add_row(one.arm, str(len(one.strata[0])), str(one.episode_seeds), gap, p_value)
    table.caption = "p is adjusted for the number of arms; * a difference is claimed"
    return table


def empty_table(title: str, columns: Sequence[str]) -> Table:
    """A table with a title; columns of numbers are aligned to the right."""
    shown = Table(
        title=title, title_justify="left", caption_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True
    )
    for column in columns:
        is_text = column in ("arm", "task")
        shown.add_column(column, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return shown
