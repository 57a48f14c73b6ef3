"""Separate results for each of several trained controllers."""

import os
from collections.abc import Sequence
from pathlib import Path

from esper.evaluation.document import Block, Paragraph, ReportTable, format_interval
from esper.evaluation.results import ArmResults, TaskResults, paired_values
from esper.evaluation.statistics import paired_difference


def per_controller_tables(task: TaskResults, main: str) -> list[Block]:
    """Each trained controller of an arm, compared with the arms without one; empty for a single controller."""
    main_results = task.arms[main]
    checkpoints = [checkpoint for checkpoint in main_results.checkpoints if checkpoint is not None]
    if len(checkpoints) < 2:
        return []
    others = {name: results for name, results in task.arms.items() if results.checkpoints == [None]}
    separate = {
        name: ArmResults(main, {key: episode for key, episode in main_results.by_key.items() if key[0] == checkpoint})
        for name, checkpoint in zip(short_labels(checkpoints), checkpoints, strict=True)
    }
    rows = []
    for name, results in {**separate, "all": main_results}.items():
        score, size = results.estimate_of("score"), results.estimate_of("parameters")
        pairs = [paired_values([results], [other]) for other in others.values()]
        cells = [
            "-" if not ours else format_interval(paired_difference(ours, theirs), "{:+.2f}") for ours, theirs in pairs
        ]
        rows.append([name, format_interval(score), "-" if size is None else f"{size.value:,.0f}", *cells])
    note = "Each trained controller separately" + (", and its difference from arms without one." if others else ".")
    return [
        Paragraph(note),
        ReportTable(("controller", "score", "parameters", *(f"- {name}" for name in others)), rows),
    ]


def short_labels(labels: Sequence[str]) -> list[str]:
    """Paths of checkpoints without the part that all have in common."""
    paths = [Path(label) for label in labels]
    runs = [path.parent.parent if path.parent.name == "checkpoints" else path for path in paths]
    common = os.path.commonpath(runs) if all(run.is_absolute() for run in runs) else ""
    names = [os.path.relpath(run, common) if common else str(run) for run in runs]
    return names if len(set(names)) == len(names) else list(labels)
