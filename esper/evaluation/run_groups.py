"""Comparison of settings that were each trained with several run seeds."""

from collections.abc import Sequence

import numpy as np

from esper.evaluation.document import Block, Paragraph, ReportTable, format_interval
from esper.evaluation.statistics import MIN_UNITS, estimate, mean
from esper.evaluation.training_runs import TrainingRun, run_names
from esper.records import HELD_OUT

COMPARED_KIND = HELD_OUT[-1]  # sampled, as a policy acts in training


def run_group_tables(runs: Sequence[TrainingRun]) -> list[Block]:
    """A table for each task that compares settings over their runs; empty if no settings were trained repeatedly."""
    tasks: dict[tuple[str, str], dict[str, list[TrainingRun]]] = {}
    for run in runs:
        tasks.setdefault((run.task, run.score_metric), {}).setdefault(run.settings, []).append(run)
    repeated = [groups for groups in tasks.values() if len(groups) > 1 and max(map(len, groups.values())) > 1]
    note = (
        "Each line is the mean over runs that differ in their run seed only, with its 95 % interval, of columns of the "
        "table above; the last column is the difference from the first line, on the run seeds that both have. With "
        f"fewer than {MIN_UNITS} runs, an interval is little more than the range of the values."
    )
    header = ("settings", "runs", "ends", *HELD_OUT, f"worst {COMPARED_KIND}", f"{COMPARED_KIND} - first")
    tables = [ReportTable(header, _group_rows(groups)) for groups in repeated]
    return [*tables, Paragraph(note)] if tables else []


def _group_rows(groups: dict[str, list[TrainingRun]]) -> list[list[str]]:
    names = run_names([(settings, settings.split()) for settings in groups])
    first, rows = next(iter(groups.values())), []
    for name, group in zip(names, groups.values(), strict=True):
        held_out = [_last_held_out_scores(group, kind) for kind in HELD_OUT]
        cells = [_format_mean(list(scores.values())) for scores in (_final_scores(group), *held_out)]
        worst = f"{min(held_out[-1].values()):.2f}" if held_out[-1] else "-"
        gap = "" if group is first else _format_gap(held_out[-1], _last_held_out_scores(first, COMPARED_KIND))
        rows.append([name, str(len(group)), *cells, worst, gap])
    return rows


def _last_held_out_scores(runs: Sequence[TrainingRun], kind: str) -> dict[str, float]:
    """The last held-out score of each run by its run seed; empty if a run has none."""
    curves = {run.run_seed: run.held_out_curve(kind)[1] for run in runs}
    return {run_seed: scores[-1] for run_seed, scores in curves.items()} if all(curves.values()) else {}


def _final_scores(runs: Sequence[TrainingRun]) -> dict[str, float]:
    """The mean score of each run's last quarter by its run seed; empty if a run has none."""
    scores = {run.run_seed: run.quarter_mean(run.score_metric, last=True) for run in runs}
    known = {run_seed: score for run_seed, score in scores.items() if score is not None}
    return known if len(known) == len(scores) else {}


def _format_mean(scores: Sequence[float], form: str = "{:.2f}") -> str:
    """With an interval if there are several."""
    if len(scores) < 2:
        return form.format(*scores) if scores else "-"
    return format_interval(estimate([np.array(scores)[:, None]], mean), form)


def _format_gap(ours: dict[str, float], theirs: dict[str, float]) -> str:
    gaps = [score - theirs[run_seed] for run_seed, score in ours.items() if run_seed in theirs]
    return _format_mean(gaps, "{:+.2f}")
