"""Negative controls: where there is nothing to be gained, nothing may be gained."""

from esper.evaluation.document import Block, Table, Text
from esper.evaluation.results import Task, shared
from esper.evaluation.statistics import Estimate, difference

GROWTH = 1.10  # times the host's parameters, at most, of a controller that has learned to wait


def controls(task: Task) -> list[Block]:
    """Each control with what was expected, what was found, and whether it holds."""
    rows = [
        _not_above(task, "placebo", "none", "seeds that cannot help bring no gain"),
        _not_above(task, "ppo_permuted", "replay", "a policy shown other episodes does no better than a replay"),
        _waits(task),
    ]
    text = "A control holds where the interval does not lie above zero. Arms not played can be added to `controllers`."
    return [Table(("control", "expected", "found", "holds"), rows), Text(text)]


def _gap(task: Task, ours: str, theirs: str) -> Estimate | None:
    if not {ours, theirs} <= set(task.arms):
        return None
    mine, other = shared([task.arms[ours]], [task.arms[theirs]])
    return difference(mine, other) if mine else None


def _not_above(task: Task, ours: str, theirs: str, expected: str) -> list[str]:
    gap = _gap(task, ours, theirs)
    if gap is None:
        return [f"{ours} - {theirs}", expected, "not played", "-"]
    found = f"{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]"
    return [f"{ours} - {theirs}", expected, found, "no" if gap.low > 0 else "yes"]


def _waits(task: Task) -> list[str]:
    """Only where growth does not pay, by the arms that grow whatever they see."""
    name, expected = "growth of ppo", "where growth does not pay, the policy waits"
    gaps = [gap for arm in ("all_seeds", "schedule") if (gap := _gap(task, arm, "none")) is not None]
    if not gaps or "ppo" not in task.arms:
        return [name, expected, "not played", "-"]
    if any(gap.low > 0 for gap in gaps):
        return [name, expected, "growth pays here: all_seeds or schedule scores above none", "-"]
    parameters = task.arms["ppo"].table("parameters").mean()
    growth = float(parameters / task.arms["ppo"].table("host_parameters").mean())
    return [name, expected, f"{growth:.2f} x the host's parameters", "yes" if growth <= GROWTH else "no"]
