"""When a trained controller has paid for its own training."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.evaluation.arms import get_arm
from esper.evaluation.document import Block, Paragraph, ReportTable, interval
from esper.evaluation.results import TaskResults, paired_values
from esper.evaluation.statistics import MIN_UNITS, Estimate, difference

GIGA = 1e-9


def break_even(
    task: TaskResults, main: str, checkpoints: Mapping[str, Mapping[str, Any]], search_gflops: float | None
) -> list[Block]:
    """After how many uses the training of a controller is paid back, against each other arm; nothing without one.

    `searched` is what a search for the best timetable has cost, in GFLOPs for each host.
    """
    every = [checkpoints.get(str(label), {}).get("gflops") for label in task.arms[main].checkpoints]
    known = [gflops for gflops in every if gflops is not None]
    if len(known) < len(every):
        return []
    trained = float(np.mean(known))
    rows = []
    for name, other in task.arms.items():
        mine, theirs = paired_values([task.arms[main]], [other])
        if name == main or not mine or not _rival(name):
            continue
        spent, theirs_spent = paired_values([task.arms[main]], [other], "flops")
        gap, saved = difference(mine, theirs), difference(theirs_spent, spent)
        if mine[0].shape[-1] < MIN_UNITS:
            uses = "too few seeds"
        elif saved.low > 0 and gap.high >= 0:
            uses = f"{math.ceil(trained / (saved.value * GIGA)):,}"
        else:
            uses = "never: it does not cost less" if saved.low <= 0 else "never: it scores less"
        saving = Estimate(*(GIGA * value for value in (saved.value, saved.low, saved.high)))
        rows.append([f"{main} - {name}", interval(gap, "{:+.2f}"), interval(saving, "{:+,.1f}"), uses])
    words = (
        f"Training a controller took {trained:,.0f} GFLOPs (the mean over controllers; held-out episodes included "
        "where they were recorded, the warm-up of its statistics not). A use is an episode; it is paid back against an "
        "arm where it is sure to save FLOPs and cannot be told to score less. Where it does not cost less, what it "
        "buys is score. Arms that are made from its own episodes are left out."
    )
    if search_gflops and "best_open_loop" in task.arms:
        words += (
            f" The search for best_open_loop took {search_gflops:,.0f} GFLOPs, and would have to be made for every new "
            f"host; a controller that serves new hosts too is paid back by {math.ceil(trained / search_gflops):,} of them."
        )
    return [Paragraph(words), ReportTable(("comparison", "score", "GFLOPs saved a use", "uses until paid back"), rows)]


def _rival(name: str) -> bool:
    """Whether an arm is a way to do without the controller: neither made from its episodes, nor a control."""
    arm = get_arm(name.partition(" (")[0])
    return not arm.needs and not arm.control
