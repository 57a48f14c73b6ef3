"""What searches found and cost, and how far each arm is from the best plan that is known for the task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.evaluation.document import Block, Paragraph, ReportTable, format_interval
from esper.evaluation.provenance import Provenance
from esper.evaluation.results import ArmResults, TaskResults, paired_values
from esper.evaluation.statistics import RESAMPLES, Estimate, estimate, paired_difference

BASELINE = "none"
SEARCH_NOTE = (
    "Searches choose by validation score on episode seeds that no evaluation uses; the scores here are theirs, and "
    "high by luck. GFLOPs are what a search took in total, trials that others share included; they are not part of any "
    "episode's cost. A number after @ is the cost of a shorter search, in budgets of an episode."
)
RATE_NOTE = (
    "Other arms have one rule for the learning rate. Here an arm chooses a factor of all its learning rates, because "
    "arms differ in their number of updates; the choice is a search on other episode seeds."
)
MIN_ERRORS = 3.0  # standard errors by which the oracle must be above the baseline for a normalised regret


@dataclass(frozen=True)
class Regret:
    """How much an arm scores below the oracle."""

    points: Estimate
    normalised: float | None  # relative to the difference of oracle and none; None where that is too small


def regrets(task: TaskResults, oracle: str | None, *, resamples: int = RESAMPLES) -> dict[str, Regret]:
    """The regret of each arm of a task, highest score first; empty without an oracle.

    Intervals are by bootstrap: with a single one of `resamples`, only values have a meaning.
    """
    if oracle is None or oracle not in task.arms:
        return {}
    gap = _distinct_gap(task, oracle)
    found = {}
    for name, results in task.arms.items():
        mine, theirs = paired_values([task.arms[oracle]], [results])
        if mine:
            points = paired_difference(mine, theirs, resamples=resamples)
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
    value = paired_difference(mine, theirs, resamples=1).value
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
    rows = [
        [name, _describe_choice(part), _format_score(part["score"]), f"{part['gflops']:,.0f}", f"{part['episodes']:,}"]
        for arm, outcome in searches.items()
        for name, part in _with_prefixes(arm, _sum_over_tasks(outcome)).items()
    ]
    header = ("search", "plan", "validation score", "GFLOPs of the search", "episodes")
    return ReportTable(header, rows) if rows else None


def task_search_table(searches: Mapping[str, Mapping[str, Any]]) -> ReportTable | None:
    """One row for each task and each of its own searches; None if no task has any."""
    rows = [
        [task, name, part["plan"], _format_score(part["score"]), f"{part['gflops']:,.1f}", f"{part['episodes']:,}"]
        for arm, outcome in searches.items()
        for task, own in outcome.get("tasks", {}).items()
        for name, part in _with_prefixes(arm, own).items()
    ]
    header = ("task", "search", "plan", "validation score", "GFLOPs of the search", "episodes")
    return ReportTable(header, sorted(rows, key=lambda row: row[0])) if rows else None


def searches_of_task(searches: Mapping[str, Mapping[str, Any]], task: str | None) -> dict[str, Mapping[str, Any]]:
    """The searches of one task, where tasks have their own; else all searches."""
    if not any("tasks" in outcome for outcome in searches.values()):
        return dict(searches)
    return {arm: outcome["tasks"][task] for arm, outcome in searches.items() if task in outcome.get("tasks", {})}


def _with_prefixes(arm: str, outcome: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """A search by name, after the prefixes of a successive halving."""
    return {**{f"{arm}@{budgets}": part for budgets, part in outcome.get("prefixes", {}).items()}, arm: outcome}


def _sum_over_tasks(outcome: Mapping[str, Any]) -> Mapping[str, Any]:
    """A search of each task as one: the mean score and the total cost."""
    if "tasks" not in outcome:
        return outcome
    own = list(outcome["tasks"].values())
    if not own:
        return {"plan": "none", "score": None, "gflops": 0.0, "episodes": 0}
    scores = [part["score"] for part in own]
    budgets = [key for key in own[0].get("prefixes", {}) if all(key in part.get("prefixes", {}) for part in own)]
    prefixes = {key: _sum_over_tasks({"tasks": {n: part["prefixes"][key] for n, part in enumerate(own)}})
                for key in budgets}  # fmt: skip
    gflops = sum(part["gflops"] for part in own)
    return {
        "plan": f"one for each of {len(own)} tasks, {gflops / len(own):,.1f} GFLOPs each",
        "score": None if None in scores else float(np.mean(scores)),
        "gflops": gflops,
        "episodes": sum(part["episodes"] for part in own),
        **({"prefixes": prefixes} if prefixes else {}),
    }


def _describe_choice(outcome: Mapping[str, Any]) -> str:
    tasks = outcome.get("training_tasks")
    return f"{outcome['plan']}" + (f" (chosen on {tasks} training tasks)" if tasks else "")


def _format_score(score: float | None) -> str:
    return "-" if score is None else f"{score:.2f}"


def search_blocks(task: TaskResults, provenance: Provenance) -> list[Block]:
    """What searches chose, and the regret of each arm; empty without a search."""
    searches = search_table(searches_of_task(provenance.searches, task.host))
    regret, blocks = regret_table(task, provenance.oracle), list[Block]()
    if searches is not None:
        blocks += [searches, Paragraph(SEARCH_NOTE)]
    if regret is not None:
        blocks += [regret, Paragraph(describe_oracle(provenance))]
    rates = lr_table([task])
    return blocks if rates is None else [*blocks, rates, Paragraph(RATE_NOTE)]


def describe_oracle(provenance: Provenance) -> str:
    """What the oracle is, and how regret is normalised."""
    plans = "of all plans that searches chose, and of none and full,"
    if any("tasks" in outcome for outcome in provenance.searches.values()):
        plans = "on each task, of the plans of all searches and of the shipped list, and of none and full,"
    return (
        f"The oracle is {provenance.oracle}: {plans} the one with the highest mean validation score on the same "
        "episode seeds of the search. Its score here is from the episode seeds of the evaluation. Normalised is "
        f"regret / (oracle - none), only where that difference exceeds {MIN_ERRORS:.0f} standard errors."
    )


def lr_table(tasks: Sequence[TaskResults]) -> ReportTable | None:
    """Arms with the common learning rate beside those that chose their own, over tasks; None without such an arm."""
    names = dict.fromkeys(name for task in tasks for name in task.arms if name.endswith("_lr"))
    rows = []
    for chosen in names:
        name = chosen.removesuffix("_lr")
        common = [task.arms[name] for task in tasks if {name, chosen} <= set(task.arms)]
        own = [task.arms[chosen] for task in tasks if chosen in task.arms and (name in task.arms or not common)]
        mine, theirs = paired_values(own, common) if common else ([], [])
        gap = format_interval(paired_difference(mine, theirs), "{:+.2f}") if mine else "-"
        rows.append([name, _format_estimate(common), _format_estimate(own), gap])
    header = ("arm", "with the common learning rate", "with its own", "difference")
    return ReportTable(header, rows) if rows else None


def _format_estimate(arms: Sequence[ArmResults]) -> str:
    return format_interval(estimate([results.values("score") for results in arms])) if arms else "-"
