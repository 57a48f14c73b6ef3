"""After how many uses the training of a controller pays off."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.evaluation.arms import get_arm
from esper.evaluation.document import Block, Paragraph, ReportTable, format_interval
from esper.evaluation.results import TaskResults, base_arm, paired_values
from esper.evaluation.statistics import MIN_UNITS, Estimate, paired_difference

GIGA = 1e-9


def break_even_blocks(
    task: TaskResults, main: str, checkpoints: Mapping[str, Mapping[str, Any]], search_gflops: float | None
) -> list[Block]:
    """After how many uses the training cost of `main` is saved, against each other arm; empty if the cost is unknown.

    Arguments:
        task: the arms
        main: the arm of the trained controllers
        checkpoints: by label, how each was trained
        search_gflops: cost of the schedule search for each host; None without a search
    """
    costs = [checkpoints.get(str(label), {}).get("gflops") for label in task.arms[main].checkpoints]
    known = [gflops for gflops in costs if gflops is not None]
    if len(known) < len(costs):
        return []
    training_gflops = float(np.mean(known))
    rows = []
    for name, other in task.arms.items():
        mine, theirs = paired_values([task.arms[main]], [other])
        if name == main or not mine or not _is_alternative(name):
            continue
        my_flops, their_flops = paired_values([task.arms[main]], [other], "flops")
        gap, saved = paired_difference(mine, theirs), paired_difference(their_flops, my_flops)
        if mine[0].shape[-1] < MIN_UNITS:
            uses = "too few episode seeds"
        elif saved.low > 0 and gap.high >= 0:
            uses = f"{math.ceil(training_gflops / (saved.value * GIGA)):,}"
        else:
            uses = "never: it does not cost less" if saved.low <= 0 else "never: it scores less"
        saved_gflops = Estimate(GIGA * saved.value, GIGA * saved.low, GIGA * saved.high)
        cells = [format_interval(gap, "{:+.2f}"), format_interval(saved_gflops, "{:+,.1f}"), uses]
        rows.append([f"{main} - {name}", *cells])
    note = (
        f"Training a controller took {training_gflops:,.0f} GFLOPs (the mean over controllers; held-out episodes "
        "included if they were recorded, the warm-up of its statistics not). A use is an episode. Training pays off "
        "against an arm if a use costs significantly fewer FLOPs and does not score significantly less. If a use does "
        "not cost less, its benefit is the score. Arms derived from the controller's own episodes are left out."
    )
    if search_gflops and "best_open_loop" in task.arms:
        note += (
            f" The search for best_open_loop took {search_gflops:,.0f} GFLOPs and must be repeated for every new host. "
            f"A controller for many hosts pays off after {math.ceil(training_gflops / search_gflops):,} of them."
        )
    header = ("comparison", "score", "GFLOPs saved per use", "uses until training pays off")
    return [Paragraph(note), ReportTable(header, rows)]


def _is_alternative(name: str) -> bool:
    """Whether an arm can replace the controller: it is not derived from its episodes, and is no negative control."""
    arm = get_arm(base_arm(name))
    return not arm.needs and not arm.is_control
