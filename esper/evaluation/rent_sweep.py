"""How comparisons change with the weight of the rent that a score charges for parameters."""

import numpy as np

from esper.evaluation.document import Block, Paragraph, ReportTable, format_interval
from esper.evaluation.results import TaskResults, paired_values
from esper.evaluation.statistics import Strata, paired_difference

RENT_WEIGHTS = (0.0, 0.25, 0.5, 1.0, 2.0)


def rent_blocks(task: TaskResults, main: str) -> list[Block]:
    """The difference of `main` to each other arm at each weight; empty if no two arms have measured it."""
    measured = {name: results for name, results in task.arms.items() if results.has_measured(task.measured_field)}
    if main not in measured:
        return []
    rows = []
    for name, other in measured.items():
        arms = [measured[main]], [other]
        ours, theirs = paired_values(*arms, task.measured_field)
        if name == main or not ours:
            continue
        our_growth, their_growth = paired_values(*arms, "growth")
        rows.append([f"{main} - {name}"])
        for weight in RENT_WEIGHTS:
            gap = paired_difference(_net(ours, our_growth, weight), _net(theirs, their_growth, weight))
            rows[-1].append(format_interval(gap, "{:+.2f}"))
    if not rows:
        return []
    note = (
        "The score differences if scores were what is measured - weight x ln(parameters / host parameters), for each "
        "weight. Where the sign of a difference depends on the weight, a claim about it is a claim about the weight. "
        "Intervals are not adjusted for the number of comparisons."
    )
    header = ("comparison", *(f"weight {weight:g}" for weight in RENT_WEIGHTS))
    return [ReportTable(header, rows), Paragraph(note)]


def _net(scores: Strata, growth: Strata, weight: float) -> Strata:
    return [values - weight * np.log(sizes) for values, sizes in zip(scores, growth, strict=True)]
