"""What searches found and cost, and how far each arm is from the best plan that is known for the task."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.evaluation.document import Block, Paragraph, ReportTable, format_interval
from esper.evaluation.provenance import Provenance
from esper.evaluation.results import ArmResults, TaskResults, paired_values
from esper.evaluation.statistics import Estimate, paired_difference

BASELINE = "none"
MIN_ERRORS = 3.0  # standard errors by which the oracle must be above the baseline for a normalised regret


@dataclass(frozen=True)
class Regret:
    """How much an arm scores below the oracle."""

    points: Estimate
    normalised: float | None  # relative to the difference of oracle and none; None where that is too small


def regrets(task: TaskResults, oracle: str | None) -> dict[str, Regret]:
    """The regret of each arm of a task, highest score first; empty without an oracle."""
    if oracle is None or oracle not in task.arms:
        return {}
    gap = _distinct_gap(task, oracle)
    found = {}
    for name, results in task.arms.items():
        mine, theirs = paired_values([task.arms[oracle]], [results])
        if mine:
            points = paired_difference(mine, theirs)
            found[name] = Regret(points, None if gap is None else points.value / gap)
    return dict(sorted(found.items(), key=lambda item: item[1].points.value))


def _distinct_gap(task: TaskResults, oracle: str) -> float | None:
    """Oracle minus none, if it is at least MIN_ERRORS standard errors."""
    if oracle == BASELINE or BASELINE not in task.arms:
        return None
    mine, theirs = paired_values([task.arms[oracle]], [task.arms[BASELINE]])
    if not mine or mine[0].shape[-1] < 2:
        return None
    gaps = (mine[0] - theirs[0]).reshape(-1, mine[0].shape[-1]).mean(0)
    error = float(np.std(gaps, ddof=1)) / len(gaps) ** 0.5
    value = paired_difference(mine, theirs).value
    return value if value > MIN_ERRORS * error else None


def regret_table(task: TaskResults, oracle: str | None) -> ReportTable | None:
    """One row for each arm; None without an oracle."""
    rows = [
        [name, format_interval(regret.points), "-" if regret.normalised is None else f"{regret.normalised:.2f}"]
        for name, regret in regrets(task, oracle).items()
    ]
    return ReportTable(("arm", f"regret: {oracle} - arm", "normalised"), rows) if rows else None


def search_table(searches: Mapping[str, Mapping[str, Any]]) -> ReportTable | None:
    """One row for each search, and for each prefix of a successive halving; None without a search."""
    rows = []
    for arm, outcome in searches.items():
        parts = {f"{arm}@{budgets}": part for budgets, part in outcome.get("prefixes", {}).items()}
        rows += [
            [name, part["plan"], _format_score(part["score"]), f"{part['gflops']:,.0f}", f"{part['episodes']:,}"]
            for name, part in {**parts, arm: outcome}.items()
        ]
    header = ("search", "plan", "validation score", "GFLOPs of the search", "episodes")
    return ReportTable(header, rows) if rows else None


def _format_score(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"


def search_blocks(task: TaskResults, provenance: Provenance) -> list[Block]:
    """What searches chose, and the regret of each arm; empty without a search."""
    searches, regret = search_table(provenance.searches), regret_table(task, provenance.oracle)
    blocks: list[Block] = []
    if searches is not None:
        note = (
            "Searches choose by validation score on episode seeds that no evaluation uses; the scores here are theirs, "
            "and high by luck. GFLOPs are what a search took in total, trials that others share included; they are not "
            "part of any episode's cost. A number after @ is the cost of a shorter search, in budgets of an episode."
        )
        blocks += [searches, Paragraph(note)]
    if regret is not None:
        note = (
            f"The oracle is {provenance.oracle}: of all plans that searches chose, and of none and full, the one with "
            "the highest mean validation score on the same episode seeds of the search. Its score here is from the "
            "episode seeds of the evaluation. Normalised is regret / (oracle - none), only where that difference "
            f"exceeds {MIN_ERRORS:.0f} standard errors."
        )
        blocks += [regret, Paragraph(note)]
    rates = lr_table(task)
    if rates is not None:
        note = (
            "Other arms have one rule for the learning rate. Here an arm chooses a factor of all its learning rates, "
            "because arms differ in their number of updates; the choice is a search on other episode seeds."
        )
        blocks += [rates, Paragraph(note)]
    return blocks


def lr_table(task: TaskResults) -> ReportTable | None:
    """Arms with the common learning rate beside those that chose their own; None without such an arm."""
    pairs = {name.removesuffix("_lr"): name for name in task.arms if name.endswith("_lr")}
    rows = []
    for name, chosen in pairs.items():
        common = task.arms.get(name)
        mine, theirs = paired_values([task.arms[chosen]], [common]) if common else ([], [])
        gap = format_interval(paired_difference(mine, theirs), "{:+.2f}") if mine else "-"
        rows.append([name, _format_estimate(common), _format_estimate(task.arms[chosen]), gap])
    header = ("arm", "with the common learning rate", "with its own", "difference")
    return ReportTable(header, rows) if rows else None


def _format_estimate(results: ArmResults | None) -> str:
    return "-" if results is None else format_interval(results.estimate_of("score"))
