"""What is left of finished episodes: a table on the screen, a report, and the figures as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.evaluation.document import interval, write_report
from esper.evaluation.results import FIGURES, TaskResults, group_by_task, paired_values
from esper.evaluation.sections import FEW, Provenance, pick_reference, report_sections, verdict
from esper.evaluation.statistics import MIN_UNITS, difference
from esper.evaluation.training_runs import TrainingRun, table
from esper.records import EpisodeRecord

EVALUATION_FILE = "evaluation.json"
RENAMED = {"learners": "checkpoints", "searched": "search_gflops"}  # keys that files of version 0.1 have
BRIEF = 12  # letters of an arm's name that fit the head of a column


def read_provenance(directory: Path) -> dict[str, Any]:
    """What an evaluation has said of how its episodes came about; empty if it has not."""
    path = directory / EVALUATION_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return {"remarks": [f"{path}: cannot be read; how its episodes came about is not known."]}
    if not isinstance(found, dict):
        return {}
    kinds = {
        "commands": list, "remarks": list, "versions": dict, "checkpoints": dict, "reference": str,
        "search_gflops": float,
    }  # fmt: skip
    values = {RENAMED.get(key, key): value for key, value in found.items()}
    return {key: values[key] for key, kind in kinds.items() if isinstance(values.get(key), kind)}


def write_results(
    lines: Sequence[EpisodeRecord],
    provenance: Provenance,
    directory: Path,
    console: Console,
    runs: Sequence[TrainingRun] = (),
) -> dict[str, dict[str, Any]]:
    """Write report.md, report.html and evaluation.json, and print the tables; gives each task's figures by arm."""
    tasks, remarks = group_by_task(lines)
    if not tasks and not runs:
        console.print("there are no finished episodes to report")
        return {}
    known = asdict(provenance)  # what the episodes themselves show is found again whenever they are read
    provenance = replace(provenance, remarks=list(dict.fromkeys([*provenance.remarks, *remarks])))
    for task in tasks:
        console.print(_table(task, pick_reference(task, provenance.reference)))
    if runs:
        console.print(_learned(runs))
    for remark in provenance.remarks:
        console.print(remark, soft_wrap=True)
    if tasks and min(len(results.episode_seeds) for task in tasks for results in task.arms.values()) < MIN_UNITS:
        console.print(FEW, soft_wrap=True)
    found = {task.title: _figures(task, pick_reference(task, provenance.reference)) for task in tasks}
    written = {**known, "tasks": found}
    (directory / EVALUATION_FILE).write_text(json.dumps(written, indent=2), encoding="utf-8")
    paths = write_report(directory, *report_sections(tasks, provenance, runs))
    console.print(f"{directory}/{', '.join(path.name for path in paths)}, {EVALUATION_FILE}", soft_wrap=True)
    return found


def _figures(task: TaskResults, main: str) -> dict[str, Any]:
    """Of each arm: how many episodes, the figures of the results table, and how the reference compares with it."""
    found: dict[str, Any] = {}
    for name, results in task.arms.items():
        figures = {title: results.figure(title) for title in FIGURES}
        found[name] = {
            "controllers": len(results.checkpoints),
            "seeds": len(results.episode_seeds),
            "episodes": len(results.lines),
        }
        found[name] |= {title: None if figure is None else asdict(figure) for title, figure in figures.items()}
        mine, theirs = paired_values([task.arms[main]], [results])
        if name != main and mine:
            gap = difference(mine, theirs)
            outcome = verdict(gap, mine[0].shape[-1])
            found[name]["compared"] = {"reference": main, **asdict(gap), "reference_is": outcome}
    return found


def _learned(runs: Sequence[TrainingRun]) -> Table:
    """One row for each training run."""
    shown = Table(title="training", title_justify="left", box=SIMPLE, pad_edge=False)
    found = table(runs)
    for column, right in zip(found.header, found.figures, strict=True):
        shown.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in found.rows:
        shown.add_row(*map(escape, row))
    return shown


def _table(task: TaskResults, main: str) -> Table:
    """One row for each arm, best first."""
    title = f"{task.title}: interquartile means [95 % intervals]"
    if len(main) > BRIEF:
        title += f"; first is {main}"
    shown = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    compared = [f"{main if len(main) <= BRIEF else 'first'} - arm"] if len(task.arms) > 1 else []
    for column in ("arm", "episodes", *FIGURES, *compared):
        words = column == "arm"
        shown.add_column(column, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    rows = []
    for name, results in task.arms.items():
        cells = []
        for title, (_, form, _) in FIGURES.items():
            figure = results.figure(title)
            cells.append("-" if figure is None else form.format(figure.value))
            if figure is not None and title == "score":
                cells[-1] += f" [{form.format(figure.low)}, {form.format(figure.high)}]"
        mine, theirs = paired_values([task.arms[main]], [results])
        gap = difference(mine, theirs) if name != main and mine else None
        shown_gap = "" if gap is None else interval(gap, "{:+.2f}")
        score = results.figure("score")
        rows.append(
            (
                0 if score is None else -score.value,
                [name, str(len(results.lines)), *cells, *([shown_gap] if compared else [])],
            )
        )
    for _, row in sorted(rows, key=lambda item: item[0]):
        shown.add_row(*row)
    return shown
