"""When a trained controller has paid for its own training."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from esper.evaluation.document import Block, Table, Text, interval
from esper.evaluation.results import Task, shared
from esper.evaluation.statistics import ENOUGH, difference


def amortised(task: Task, main: str, learners: Mapping[str, Mapping[str, Any]], searched: float | None) -> list[Block]:
    """After how many uses the training of a controller is paid back, against each other arm; nothing without one.

    `searched` is what a search for the best timetable has cost, in GFLOPs for each host.
    """
    every = [learners.get(str(label), {}).get("gflops") for label in task.arms[main].learners]
    known = [gflops for gflops in every if gflops is not None]
    if len(known) < len(every):
        return []
    trained, own = float(np.mean(known)), task.arms[main].figure("GFLOPs")
    rows = []
    for name, other in task.arms.items():
        mine, theirs = shared([task.arms[main]], [other])
        cost = other.figure("GFLOPs")
        if name == main or not mine or cost is None or own is None:
            continue
        gap, saved = difference(mine, theirs), cost.value - own.value
        if mine[0].shape[1] < ENOUGH:
            uses = "too few seeds"
        elif saved > 0 and gap.high >= 0:
            uses = f"{math.ceil(trained / saved):,}"
        else:
            uses = "never: it costs more" if saved <= 0 else "never: it scores less"
        rows.append([f"{main} - {name}", interval(gap, "{:+.2f}"), f"{saved:,.1f}", uses])
    words = (
        f"Training a controller took {trained:,.0f} GFLOPs (the mean over controllers). A use is an episode; it is "
        "paid back against an arm where it saves FLOPs and cannot be told to score less. Where it costs more, what it "
        "buys is score."
    )
    if searched and "best_open_loop" in task.arms:
        words += (
            f" The search for best_open_loop took {searched:,.0f} GFLOPs, and would have to be made for every new "
            f"host; a controller that serves new hosts too is paid back by {math.ceil(trained / searched):,} of them."
        )
    return [Text(words), Table(("comparison", "score", "GFLOPs saved a use", "uses until paid back"), rows)]
