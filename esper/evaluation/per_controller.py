"""Separate results for each of several trained controllers."""

import os
from collections.abc import Sequence
from pathlib import Path

from esper.evaluation.document import Block, Paragraph, ReportTable, format_interval
from esper.evaluation.results import ArmResults, TaskResults, paired_values
from esper.evaluation.statistics import estimate, mean, paired_difference

COMPARED_ARMS = ("none", "best_static@1", "grow_once")  # that claims about controllers on many tasks need


def per_controller_tables(task: TaskResults, main: str) -> list[Block]:
    """Each trained controller of an arm, compared with the arms without one; empty for a single controller."""
    main_results = task.arms[main]
    checkpoints = [checkpoint for checkpoint in main_results.checkpoints if checkpoint is not None]
    if len(checkpoints) < 2:
        return []
    others = {name: results for name, results in task.arms.items() if results.checkpoints == [None]}
    separate = {
        name: _of_checkpoint(main_results, checkpoint)
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


def controllers_over_tasks(tasks: Sequence[TaskResults], main: str, primary: str | None) -> ReportTable | None:
    """Each trained controller of an arm over tasks, and its difference from the arms that claims are about.

    None if there is a single controller.
    """
    own = [task for task in tasks if main in task.arms]
    checkpoints = [one for one in (own[0].arms[main].checkpoints if own else []) if one is not None]
    if len(checkpoints) < 2:
        return None
    wanted = dict.fromkeys([*([primary] if primary else []), *COMPARED_ARMS])
    others = [name for name in wanted if name != main and all(name in task.arms for task in own)]
    rows = []
    for label, checkpoint in zip(short_labels(checkpoints), checkpoints, strict=True):
        alone = [_of_checkpoint(task.arms[main], checkpoint) for task in own]
        cells = [
            format_interval(paired_difference(*paired_values(alone, [task.arms[name] for task in own])), "{:+.2f}")
            for name in others
        ]
        score = estimate([results.values("score") for results in alone], mean)
        rows.append([label, str(len(alone)), f"{score.value:.2f}", *cells])
    return ReportTable(("controller", "tasks", "score", *(f"- {name}" for name in others)), rows)


def _of_checkpoint(results: ArmResults, checkpoint: str) -> ArmResults:
    """The episodes of one controller."""
    return ArmResults(results.arm, {key: each for key, each in results.by_key.items() if key[0] == checkpoint})


def short_labels(labels: Sequence[str]) -> list[str]:
    """Paths of checkpoints without the part that all have in common."""
    paths = [Path(label) for label in labels]
    runs = [path.parent.parent if path.parent.name == "checkpoints" else path for path in paths]
    common = os.path.commonpath(runs) if all(run.is_absolute() for run in runs) else ""
    names = [os.path.relpath(run, common) if common else str(run) for run in runs]
    return names if len(set(names)) == len(names) else list(labels)
