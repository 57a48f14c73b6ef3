"""Settings that were trained from several seeds each, beside one another."""

from collections.abc import Sequence

import numpy as np

from esper.evaluation.document import Block, Paragraph, ReportTable, interval
from esper.evaluation.statistics import MIN_UNITS, estimate, mean
from esper.evaluation.training_runs import TrainingRun, run_names
from esper.records import HELD_OUT

ACTS = HELD_OUT[-1]  # as a policy does while it learns


def repeated_runs(runs: Sequence[TrainingRun]) -> list[Block]:
    """What each of several settings came to over its runs, for each task; nothing where none was trained again."""
    tasks: dict[tuple[str, str], dict[str, list[TrainingRun]]] = {}
    for run in runs:
        tasks.setdefault((run.task, run.score), {}).setdefault(run.settings, []).append(run)
    several = [groups for groups in tasks.values() if len(groups) > 1 and max(map(len, groups.values())) > 1]
    words = (
        "Each line is the mean over runs that differ in their seed alone, with its 95 % interval, of columns of the "
        "table before; the last is the difference from the first line, on the seeds that both were trained from. With "
        f"fewer than {MIN_UNITS} runs, intervals are hardly more than the range of what was seen."
    )
    header = ("settings", "runs", "ends", *HELD_OUT, f"worst {ACTS}", f"{ACTS} - first")
    tables = [ReportTable(header, _rows(groups)) for groups in several]
    return [*tables, Paragraph(words)] if tables else []


def _rows(groups: dict[str, list[TrainingRun]]) -> list[list[str]]:
    names = run_names([(settings, settings.split()) for settings in groups])
    first, rows = next(iter(groups.values())), []
    for name, some in zip(names, groups.values(), strict=True):
        held_out = [_last(some, kind) for kind in HELD_OUT]
        cells = [_mean(list(scores.values())) for scores in (_ends(some), *held_out)]
        worst = f"{min(held_out[-1].values()):.2f}" if held_out[-1] else "-"
        gap = "" if some is first else _gap(held_out[-1], _last(first, ACTS))
        rows.append([name, str(len(some)), *cells, worst, gap])
    return rows


def _last(runs: Sequence[TrainingRun], kind: str) -> dict[str, float]:
    """The last held-out score of each run by its seed; empty if any has none."""
    found = {run.seed: run.known(f"validation/{kind}_{run.score.partition('/')[2]}")[1] for run in runs}
    return {seed: scores[-1] for seed, scores in found.items()} if all(found.values()) else {}


def _ends(runs: Sequence[TrainingRun]) -> dict[str, float]:
    found = {run.seed: run.quarter(run.score, last=True) for run in runs}
    known = {seed: value for seed, value in found.items() if value is not None}
    return known if len(known) == len(found) else {}


def _mean(scores: Sequence[float], form: str = "{:.2f}") -> str:
    """With its interval, which a single run has not."""
    if len(scores) < 2:
        return form.format(*scores) if scores else "-"
    return interval(estimate([np.array(scores)[:, None]], mean), form)


def _gap(ours: dict[str, float], theirs: dict[str, float]) -> str:
    return _mean([score - theirs[seed] for seed, score in ours.items() if seed in theirs], "{:+.2f}")
