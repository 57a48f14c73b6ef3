"""Each of several trained controllers by itself."""

import os
from collections.abc import Sequence
from pathlib import Path

from esper.evaluation.document import Block, Table, Text, interval
from esper.evaluation.results import Results, Task, shared
from esper.evaluation.statistics import difference


def singly(task: Task, main: str) -> list[Block]:
    """How each controller of an arm compares with what others do without one; nothing for a single controller."""
    learners = [learner for learner in task.arms[main].learners if learner is not None]
    if len(learners) < 2:
        return []
    others = {name: results for name, results in task.arms.items() if results.learners == [None]}
    lines, rows = task.arms[main].lines, []
    named = {name: {place: line for place, line in lines.items() if place[0] == learner}
             for name, learner in zip(distinct(learners), learners, strict=True)}  # fmt: skip
    for name, own in {**named, "all": lines}.items():
        mine = Results(main, own)
        score, size = mine.figure("score"), mine.figure("parameters")
        gaps = [shared([mine], [other]) for other in others.values()]
        cells = ["-" if not ours else interval(difference(ours, theirs), "{:+.2f}") for ours, theirs in gaps]
        rows.append([name, interval(score), "-" if size is None else f"{size.value:,.0f}", *cells])
    words = "Each trained controller by itself" + (", and how far it is from arms without one." if others else ".")
    return [Text(words), Table(("controller", "score", "parameters", *(f"- {name}" for name in others)), rows)]


def distinct(labels: Sequence[str]) -> list[str]:
    """Paths of checkpoints, without what all have in common."""
    paths = [Path(label) for label in labels]
    runs = [path.parent.parent if path.parent.name == "checkpoints" else path for path in paths]
    common = os.path.commonpath(runs) if all(run.is_absolute() for run in runs) else ""
    names = [os.path.relpath(run, common) if common else str(run) for run in runs]
    return names if len(set(names)) == len(names) else list(labels)
