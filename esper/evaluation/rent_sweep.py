"""How comparisons change with the weight of the rent that a score charges for parameters."""

from collections.abc import Sequence

import numpy as np

from esper.evaluation.claims import are_few_controllers
from esper.evaluation.document import Block, Paragraph, ReportTable, format_interval
from esper.evaluation.results import TaskResults, paired_values
from esper.evaluation.statistics import Strata, paired_difference

RENT_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0)


def rent_blocks(tasks: Sequence[TaskResults], main: str) -> list[Block]:
    """The difference of `main` to each other arm at each weight, over tasks; empty if no two arms have measured it."""
    table = rent_table(tasks, main)
    if table is None:
        return []
    note = (
        "The score differences if scores were what is measured - weight x ln(parameters / host parameters), for each "
        "weight. Where the sign of a difference depends on the weight, a claim about it is a claim about the weight. "
        "Intervals are not adjusted for the number of comparisons."
    )
    return [table, Paragraph(note)]


def rent_table(tasks: Sequence[TaskResults], main: str) -> ReportTable | None:
    """One row for each other arm that has measured it on the tasks of `main`; None without any."""
    measured = [
        {name: results for name, results in task.arms.items() if results.has_measured(task.measured_field)}
        for task in tasks
    ]
    fields, rows = [task.measured_field for task in tasks], []
    for name in dict.fromkeys(name for arms in measured for name in arms if name != main):
        both = [(arms[main], arms[name], field) for arms, field in zip(measured, fields, strict=True)
                if {main, name} <= set(arms)]  # fmt: skip
        strata = [
            (*paired_values([ours], [theirs], field), *paired_values([ours], [theirs], "growth"))
            for ours, theirs, field in both
        ]
        ours, theirs, our_growth, their_growth = (
            [values for part in strata for values in part[column]] for column in range(4)
        )
        if not ours:
            continue
        few = are_few_controllers([results for pair in both for results in pair[:2]], len(ours))
        rows.append([f"{main} - {name}"])
        for weight in RENT_WEIGHTS:
            net = _net(ours, our_growth, weight), _net(theirs, their_growth, weight)
            rows[-1].append(format_interval(paired_difference(*net, fixed_controllers=few), "{:+.2f}"))
    header = ("comparison", *(f"weight {weight:g}" for weight in RENT_WEIGHTS))
    return ReportTable(header, rows) if rows else None


def _net(scores: Strata, growth: Strata, weight: float) -> Strata:
    return [values - weight * np.log(sizes) for values, sizes in zip(scores, growth, strict=True)]
