"""Each of several trained controllers by itself."""

import os
from collections.abc import Sequence
from pathlib import Path

from esper.evaluation.document import Block, Paragraph, ReportTable, interval
from esper.evaluation.results import ArmResults, TaskResults, paired_values
from esper.evaluation.statistics import difference


def per_controller_tables(task: TaskResults, main: str) -> list[Block]:
    """How each controller of an arm compares with what others do without one; nothing for a single controller."""
    checkpoints = [checkpoint for checkpoint in task.arms[main].checkpoints if checkpoint is not None]
    if len(checkpoints) < 2:
        return []
    others = {name: results for name, results in task.arms.items() if results.checkpoints == [None]}
    lines, rows = task.arms[main].lines, []
    named = {name: {place: line for place, line in lines.items() if place[0] == checkpoint}
             for name, checkpoint in zip(short_labels(checkpoints), checkpoints, strict=True)}  # fmt: skip
    for name, own in {**named, "all": lines}.items():
        mine = ArmResults(main, own)
        score, size = mine.figure("score"), mine.figure("parameters")
        gaps = [paired_values([mine], [other]) for other in others.values()]
        cells = ["-" if not ours else interval(difference(ours, theirs), "{:+.2f}") for ours, theirs in gaps]
        rows.append([name, interval(score), "-" if size is None else f"{size.value:,.0f}", *cells])
    words = "Each trained controller by itself" + (", and how far it is from arms without one." if others else ".")
    return [
        Paragraph(words),
        ReportTable(("controller", "score", "parameters", *(f"- {name}" for name in others)), rows),
    ]


def short_labels(labels: Sequence[str]) -> list[str]:
    """Paths of checkpoints, without what all have in common."""
    paths = [Path(label) for label in labels]
    runs = [path.parent.parent if path.parent.name == "checkpoints" else path for path in paths]
    common = os.path.commonpath(runs) if all(run.is_absolute() for run in runs) else ""
    names = [os.path.relpath(run, common) if common else str(run) for run in runs]
    return names if len(set(names)) == len(names) else list(labels)
