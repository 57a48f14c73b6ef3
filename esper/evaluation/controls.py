"""Negative controls: where there is nothing to be gained, nothing may be gained."""

import numpy as np

from esper.evaluation.document import Block, Paragraph, ReportTable
from esper.evaluation.results import TaskResults, paired_values
from esper.evaluation.statistics import MIN_UNITS, Estimate, difference

GROWTH = 1.10  # times the host's parameters, in the mean over steps, at most, of a controller that has learned to wait


def controls(task: TaskResults) -> list[Block]:
    """Each control with what was expected, what was found, and whether that speaks against it."""
    rows = [
        _not_above(task, "placebo", "none", "seeds that cannot help bring no gain"),
        _not_above(task, "ppo_permuted", "replay", "a policy shown other episodes does no better than a replay"),
        _not_above(task, "replay", "ppo", "nor does a replay do better than the policy itself"),
        _waits(task),
    ]
    words = (
        f"A control is contradicted where the interval lies above zero, on {MIN_UNITS} seeds or more; that it is not "
        "contradicted proves nothing by itself. Arms not played can be added to `controllers`."
    )
    return [ReportTable(("control", "expected", "found", "verdict"), rows), Paragraph(words)]


def gap(task: TaskResults, ours: str, theirs: str) -> tuple[Estimate | None, int]:
    """The paired difference of two arms, and on how many seeds; None if there is none."""
    if not {ours, theirs} <= set(task.arms):
        return None, 0
    mine, other = paired_values([task.arms[ours]], [task.arms[theirs]])
    return (difference(mine, other), mine[0].shape[-1]) if mine else (None, 0)


def _not_above(task: TaskResults, ours: str, theirs: str, expected: str) -> list[str]:
    found, seeds = gap(task, ours, theirs)
    if found is None:
        return [f"{ours} - {theirs}", expected, "not played", ""]
    told = f"{found.value:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"
    return [f"{ours} - {theirs}", expected, told, _verdict(found.low > 0, seeds)]


def _verdict(against: bool, seeds: int) -> str:
    if seeds < MIN_UNITS:
        return "too few seeds"
    return "contradicted" if against else "not contradicted"


def _waits(task: TaskResults) -> list[str]:
    """Only where growth does not pay, by the arms that grow whatever they see."""
    name, expected = "growth of ppo", "where growth does not pay, the policy waits"
    gaps = [found for arm in ("all_seeds", "schedule") if (found := gap(task, arm, "none"))[0] is not None]
    if not gaps or "ppo" not in task.arms:
        return [name, expected, "not played", ""]
    if any(found is not None and found.low > 0 for found, _ in gaps):
        return [name, expected, "growth pays here: all_seeds or schedule scores above none", ""]
    lines = list(task.arms["ppo"].lines.values())
    growth = float(np.mean([line.parameters_mean / line.host_parameters for line in lines]))
    seeds = sum(len(line.germinations) for line in lines) / len(lines)
    told = f"{growth:.2f} x the host's parameters over the steps, {seeds:.1f} seeds germinated an episode"
    return [name, expected, told, _verdict(growth > GROWTH, min(count for _, count in gaps))]
