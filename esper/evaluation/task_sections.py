"""The tables and pictures of a report that are about many tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from esper.evaluation.across_tasks import (
    ArmSummary,
    are_comparable,
    best_rule,
    check_harm,
    group_by_split,
    regrets_by_family,
    summarise_arms,
    tasks_without_use,
)
from esper.evaluation.claims import ArmComparison, compare_arms, format_p_value
from esper.evaluation.document import Block, Paragraph, ReportFigure, ReportTable, Section, format_interval
from esper.evaluation.per_controller import controllers_over_tasks
from esper.evaluation.provenance import Provenance
from esper.evaluation.regret import describe_oracle, lr_table, search_table, task_search_table
from esper.evaluation.rent_sweep import rent_table
from esper.evaluation.results import BARE_HOST, FAILURE_MARGIN, RESULT_METRICS, TaskResults
from esper.evaluation.statistics import MIN_UNITS, Estimate, probability_of_improvement
from esper.tasks import LEAST_GAIN

Titled = Sequence[tuple[str, ReportTable]]


def task_group_sections(tasks: Sequence[TaskResults], main: str, provenance: Provenance) -> list[Section]:
    """A section for each split of tasks; empty for a single task."""
    if len(tasks) < 2:
        return []
    if not are_comparable(tasks):
        note = Paragraph("The tasks have different kinds of scores, which are not averaged.")
        return [Section("All tasks together", [note])]
    groups, sections = group_by_split(tasks), []
    for number, (title, own) in enumerate(groups.items()):
        name = "All tasks together" if len(groups) == 1 else f"All tasks together: {title}"
        sections.append(Section(name, _group_blocks(own, number, main, provenance)))
    searches = search_table(provenance.searches)
    if searches is not None and any("tasks" in outcome for outcome in provenance.searches.values()):
        by_task = task_search_table(provenance.searches)
        blocks: list[Block] = [searches, *([by_task] if by_task is not None else [])]
        sections.append(Section("Searches", blocks))
    return sections


def group_tables(tasks: Sequence[TaskResults], main: str, provenance: Provenance) -> Titled:
    """The tables of one split by title: also those on the screen."""
    summaries = summarise_arms(tasks, provenance.oracle)
    comparisons = compare_arms(tasks, main, provenance.primary)
    without_use = len(tasks_without_use(tasks, provenance.growth_gains))
    tables = {
        "arms": _arm_table(summaries),
        f"differences to {main}": _difference_table(comparisons, main),
        "controllers": controllers_over_tasks(tasks, main, provenance.primary),
        "cost": _cost_table(tasks),
        "regret by family": _family_table(tasks, provenance.oracle),
        f"growth cannot help on {without_use} of {len(tasks)} tasks": _harm_table(tasks, provenance.growth_gains),
        "learning rates": lr_table(tasks),
        "differences by weight of the rent": rent_table(tasks, main),
    }
    return [(title, table) for title, table in tables.items() if table is not None and table.rows]


def group_numbers(tasks: Sequence[TaskResults], main: str, provenance: Provenance) -> dict[str, Any]:
    """What the tables of one split have, as plain data."""
    best = best_rule(summaries := summarise_arms(tasks, provenance.oracle))
    return {
        "tasks": sorted(task.host or task.name for task in tasks),
        "arms": {summary.arm: summary.to_dict() for summary in summaries},
        "compared": {
            one.arm: {
                "reference": main, **one.gap.to_dict(), "p": one.gap.p_value, "p_adjusted": one.p_value,
                "is_primary": one.is_primary, "reference_is": one.claim,
                "over_controllers": None if one.over_controllers is None else one.over_controllers.to_dict(),
            }
            for one in compare_arms(tasks, main, provenance.primary)
        },
        "regret_by_family": regrets_by_family(tasks, provenance.oracle),
        "growth_cannot_help": [task.host for task in tasks_without_use(tasks, provenance.growth_gains)],
        "harm": {
            check.arm: {**check.difference.to_dict(), "is_harmless": check.verdict}
            for check in check_harm(tasks, provenance.growth_gains)
        },
        "best_rule": None if best is None else best.arm,
    }  # fmt: skip


def _group_blocks(tasks: Sequence[TaskResults], number: int, main: str, provenance: Provenance) -> list[Block]:
    notes = _notes(tasks, main, provenance)
    blocks: list[Block] = []
    for title, table in group_tables(tasks, main, provenance):
        blocks += [Paragraph(f"**{title[0].upper()}{title[1:]}**"), table]
        blocks += [Paragraph(note) for key, note in notes.items() if key in title]
    by_family = regrets_by_family(tasks, provenance.oracle)
    if by_family:
        caption = "Mean regret of each arm by family, in points: how far it is below the oracle. Darker is worse."
        blocks.append(ReportFigure(f"regret{number}", plot_regrets(by_family), caption))
    best = best_rule(summarise_arms(tasks, provenance.oracle))
    if best is not None and tasks[0].task_split == "train":
        blocks.append(Paragraph(describe_best_rule(best)))
    return blocks or [Paragraph("No two arms have episodes in more than one task.")]


def describe_best_rule(best: ArmSummary) -> str:
    return (
        f"Of the rules that carry over to other tasks, {best.arm} has the highest mean validation score on these "
        f"training tasks, {best.selection_score:.2f}: `primary={best.arm}` fixes the comparison "
        "with it for other tasks."
    )


def _notes(tasks: Sequence[TaskResults], main: str, provenance: Provenance) -> dict[str, str]:
    """A sentence or more behind each table, by a part of its title."""
    controllers = len(tasks[0].arms[main].checkpoints) if main in tasks[0].arms else 0
    units = f"controllers and {'tasks' if len(tasks) >= MIN_UNITS else 'episode seeds'}"
    if len(tasks) >= MIN_UNITS and 1 < controllers < MIN_UNITS:
        units = (
            f"tasks and their episode seeds: there are {controllers} controllers, too few for a claim about training "
            "runs in general, so the result is of these controllers. The column over controllers has the interval in "
            "which they are a sample, too"
        )
    return {
        "arms": (
            "Score is the mean over tasks. Gain is the score minus that of none on the same episode seed: its mean "
            "with an interval over tasks, that of the middle half of all episodes, and that of their worst "
            "tenth. An episode is a failure if it ended with non-finite values, or scores more than "
            f"{FAILURE_MARGIN:g} points below none. Normalised regret is the mean over the tasks in brackets. "
            + (describe_oracle(provenance) if provenance.oracle else "")
        ),
        "differences to": (
            "The mean over tasks of the interquartile mean of paired differences, on the same episode seeds. Intervals "
            f"are over {units}. p-values are adjusted for the number of comparisons (Holm), except that of the primary "
            f"one. With fewer than {MIN_UNITS} tasks, results are of these tasks."
        ),
        "by weight": "Scores minus weight x ln(parameters / host parameters); intervals as above, not adjusted.",
        "controllers": "Each trained controller by itself, with intervals over tasks.",
        "cost": "Means over tasks. Parameters at the end are relative to the host's.",
        "cannot help": (
            f"Growth cannot help where the best of full, grow_once and gated gains less than {LEAST_GAIN:g} points "
            "over none, by validation score on episode seeds of the search that no table uses. The difference "
            "is arm - none."
        ),
    }


def _arm_table(summaries: Sequence[ArmSummary]) -> ReportTable:
    def show(value: float | None, form: str = "{:+.2f}") -> str:
        return "-" if value is None else form.format(value)

    rows = [
        [
            one.arm, str(one.tasks), f"{one.score.value:.2f}", _interval(one.gain),
            show(one.middle_gain), show(one.worst_gain), f"{one.failure_rate:.0%}",
            "-" if one.regret is None else format_interval(one.regret),
            "-" if one.normalised is None else f"{one.normalised:.2f} ({one.normalised_tasks})",
        ]
        for one in summaries
    ]  # fmt: skip
    header = (
        "arm", "tasks", "score", f"gain over {BARE_HOST}", "middle", "worst", "failures", "regret", "normalised",
    )  # fmt: skip
    return ReportTable(header, rows)


def _difference_table(comparisons: Sequence[ArmComparison], main: str) -> ReportTable:
    rows = [
        [
            f"{main} - {one.arm}{' (primary)' if one.is_primary else ''}", str(len(one.strata[0])),
            str(one.episode_seeds), _interval(one.gap), _interval(one.over_controllers), format_p_value(one.p_value),
            format_interval(probability_of_improvement(*one.strata)), one.claim,
        ]
        for one in comparisons
        if len(one.strata[0]) > 1
    ]  # fmt: skip
    header = (
        "comparison", "tasks", "seeds", "score difference", "over controllers", "p, adjusted",
        "P(improvement)", f"result for {main}",
    )  # fmt: skip
    return ReportTable(header, rows)


def _cost_table(tasks: Sequence[TaskResults]) -> ReportTable:
    """What arms cost, as means over tasks."""
    rows = []
    for name in dict.fromkeys(name for task in tasks for name in task.arms):
        own = [task.arms[name] for task in tasks if name in task.arms]
        growth = float(np.mean([np.mean([each.growth for each in results.episodes]) for results in own]))
        cells = [f"{growth:.2f}x"]
        for title in ("GFLOPs", "seconds"):
            field, form, factor = RESULT_METRICS[title]
            is_known = all(results.has_measured(field) for results in own)
            value = float(np.mean([np.nanmean(results.values(field)) for results in own])) if is_known else 0.0
            cells.append(form.format(value * factor) if is_known else "-")
        rows.append([name, *cells])
    return ReportTable(("arm", "parameters", "GFLOPs", "seconds"), rows)


def _family_table(tasks: Sequence[TaskResults], oracle: str | None) -> ReportTable | None:
    by_arm = regrets_by_family(tasks, oracle)
    if not by_arm:
        return None
    families = sorted({family for own in by_arm.values() for family in own})
    rows = [
        [arm, *(f"{own[family]:.2f}" if family in own else "-" for family in families)] for arm, own in by_arm.items()
    ]
    return ReportTable(("arm", *families), rows)


def _harm_table(tasks: Sequence[TaskResults], growth_gains: Mapping[str, float]) -> ReportTable:
    rows = [[check.arm, _interval(check.difference), check.verdict] for check in check_harm(tasks, growth_gains)]
    return ReportTable(("arm", f"arm - {BARE_HOST}", f"within {LEAST_GAIN:g} points"), rows)


def _interval(estimate: Estimate | None) -> str:
    return format_interval(estimate, "{:+.2f}")


def plot_regrets(by_arm: Mapping[str, Mapping[str, float]]) -> Figure:
    """Regret by arm and family as colours, with the numbers."""
    families = sorted({family for own in by_arm.values() for family in own})
    values = np.array([[own.get(family, np.nan) for family in families] for own in by_arm.values()])
    figure = Figure(figsize=(2.5 + 1.15 * len(families), 1.6 + 0.32 * len(by_arm)), layout="constrained")
    axes: Axes = figure.subplots()
    largest = max(float(np.nanmax(values)), 1e-9)
    axes.imshow(values, cmap="Reds", vmin=0.0, vmax=largest, aspect="auto")
    axes.set_xticks(range(len(families)), families, rotation=30, ha="right", fontsize=8)
    axes.set_yticks(range(len(by_arm)), list(by_arm), fontsize=8)
    for row, own in enumerate(values):
        for column, value in enumerate(own):
            if not np.isnan(value):
                color = "white" if value > 0.6 * largest else "black"
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=7, color=color)
    axes.set_title("mean regret in points, by family", fontsize=9)
    return figure
