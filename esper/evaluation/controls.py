"""Negative controls: comparisons in which no gain is expected."""

import numpy as np

from esper.evaluation.document import Block, Paragraph, ReportTable, format_interval
from esper.evaluation.results import TaskResults, paired_values
from esper.evaluation.statistics import MIN_UNITS, Estimate, paired_difference

MAX_GROWTH = 1.10  # mean parameters over steps, relative to the host's, of a controller that has learned to wait
NO_EPISODES = "no episodes"


def control_blocks(task: TaskResults) -> list[Block]:
    """Each control with the expected and the measured result, and whether the result contradicts it."""
    rows = [
        _check_no_gain(task, "placebo", "none", "seeds that cannot help bring no gain"),
        _check_no_gain(task, "ppo_permuted", "replay", "a policy with other observations is no better than a replay"),
        _check_no_gain(task, "replay", "ppo", "a replay is no better than the policy itself"),
        _check_no_gain(task, "ppo_blind", "ppo", "a policy that observes nothing is no better than the policy itself"),
        _check_no_gain(task, "ppo_shuffled", "ppo", "nor is one with the descriptors of other blueprints"),
        _check_waiting(task),
    ]
    note = (
        f"A control is contradicted if the interval is above zero, on {MIN_UNITS} episode seeds or more. A control "
        "that is not contradicted proves nothing by itself. Arms without episodes can be added to `controllers`."
    )
    return [ReportTable(("control", "expected", "measured", "decision"), rows), Paragraph(note)]


def score_difference(task: TaskResults, ours: str, theirs: str) -> tuple[Estimate, int] | None:
    """The paired difference of two arms, and on how many episode seeds; None if one of them has no episodes."""
    if not {ours, theirs} <= set(task.arms):
        return None
    mine, other = paired_values([task.arms[ours]], [task.arms[theirs]])
    return (paired_difference(mine, other), mine[0].shape[-1]) if mine else None


def _check_no_gain(task: TaskResults, ours: str, theirs: str, expected: str) -> list[str]:
    difference = score_difference(task, ours, theirs)
    if difference is None:
        return [f"{ours} - {theirs}", expected, NO_EPISODES, ""]
    gap, count = difference
    return [f"{ours} - {theirs}", expected, format_interval(gap, "{:+.2f}"), _decide(gap.low > 0, count)]


def _decide(is_contradicted: bool, episode_seeds: int) -> str:
    if episode_seeds < MIN_UNITS:
        return "too few episode seeds"
    return "contradicted" if is_contradicted else "not contradicted"


def _check_waiting(task: TaskResults) -> list[str]:
    """Whether the policy waits; checked only where arms that always grow do not gain by it."""
    name, expected = "growth of ppo", "where growth does not pay, the policy waits"
    gaps = [gap for arm in ("all_seeds", "schedule") if (gap := score_difference(task, arm, "none")) is not None]
    if not gaps or "ppo" not in task.arms:
        return [name, expected, NO_EPISODES, ""]
    if any(gap.low > 0 for gap, _ in gaps):
        return [name, expected, "growth pays here: all_seeds or schedule scores above none", ""]
    episodes = task.arms["ppo"].episodes
    growth = float(np.mean([episode.parameters_mean / episode.host_parameters for episode in episodes]))
    germinated = sum(len(episode.germinations) for episode in episodes) / len(episodes)
    measured = f"{growth:.2f} x the host's parameters over the steps, {germinated:.1f} seeds germinated per episode"
    return [name, expected, measured, _decide(growth > MAX_GROWTH, min(count for _, count in gaps))]
