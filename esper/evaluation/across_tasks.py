"""Arms over many tasks: scores, gains over the bare host, regret by family, and harm where growth cannot help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from esper.evaluation.claims import are_few_controllers
from esper.evaluation.regret import Regret, regrets
from esper.evaluation.results import BARE_HOST, ArmResults, TaskResults, base_arm, paired_values
from esper.evaluation.statistics import Estimate, Strata, estimate, interquartile_mean, mean, worst_tenth
from esper.tasks import LEAST_GAIN

GROUP_TITLES = {  # split of tasks -> title
    "train": "training tasks",
    "validation": "validation tasks",
    "test": "unseen tasks of the training families",
    "heldout": "families that training never has",
}
ALL_TASKS = "all tasks"
RULES_FOR_ALL_TASKS = (  # arms that carry over to other tasks without a search there, and without tuned numbers
    "none", "full", "grow_once", "best_fixed", "best_open_loop", "gated", "heuristic", "fragrow", "random_rate",
)  # fmt: skip
RegretsByArm = Mapping[str, Mapping[str, Regret]]  # arm -> title of the task -> regret


@dataclass(frozen=True)
class ArmSummary:
    """One arm over the tasks that it has episodes of. Gains are scores minus those of the bare host."""

    arm: str
    tasks: int
    episodes: int
    score: Estimate  # mean
    gain: Estimate | None  # mean; None without the bare host
    middle_gain: float | None  # interquartile mean over all episodes
    worst_gain: float | None  # mean of the lowest tenth of all episodes
    failure_rate: float
    selection_score: float | None  # mean on the validation split, which choices may use
    regret: Estimate | None  # None without an oracle
    normalised: float | None  # mean regret / (oracle - none), of the tasks where that is large enough
    normalised_tasks: int

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {key: value.to_dict() if isinstance(value, Estimate) else value for key, value in vars(self).items()}


@dataclass(frozen=True)
class HarmCheck:
    """An arm on the tasks where growth cannot help."""

    arm: str
    difference: Estimate  # from the bare host

    @property
    def verdict(self) -> str:
        if self.difference.value < -LEAST_GAIN:
            return "no"
        return "yes, and its interval" if self.difference.low >= -LEAST_GAIN else "yes"


def group_by_split(tasks: Sequence[TaskResults]) -> dict[str, list[TaskResults]]:
    """Tasks by the title of their split: what training has seen, and what it has not, are separate tables."""
    groups: dict[str, list[TaskResults]] = {}
    for task in tasks:
        groups.setdefault(GROUP_TITLES.get(task.task_split or "", ALL_TASKS), []).append(task)
    return groups


def are_comparable(tasks: Sequence[TaskResults]) -> bool:
    """Whether scores are of one kind, so that they can be averaged."""
    return len({(task.is_text, task.split) for task in tasks}) == 1


def regrets_by_arm(tasks: Sequence[TaskResults], oracle: str | None) -> RegretsByArm:
    """The regret of each arm on each task, without intervals of a task; empty without an oracle."""
    found: dict[str, dict[str, Regret]] = {}
    for task in tasks:
        for arm, regret in regrets(task, oracle, resamples=1).items():
            found.setdefault(arm, {})[task.title] = regret
    return found


def summarise_arms(tasks: Sequence[TaskResults], oracle: str | None) -> list[ArmSummary]:
    """Each arm over its tasks, the highest mean score first."""
    known = regrets_by_arm(tasks, oracle)
    names = dict.fromkeys(name for task in tasks for name in task.arms)
    summaries = [_summarise(name, [task for task in tasks if name in task.arms], oracle, known) for name in names]
    return sorted(summaries, key=lambda summary: -summary.score.value)


def _summarise(arm: str, tasks: Sequence[TaskResults], oracle: str | None, known: RegretsByArm) -> ArmSummary:
    own = [task.arms[arm] for task in tasks]
    gaps = _gaps(tasks, arm, BARE_HOST)
    every = np.concatenate([values.ravel() for values in gaps]) if gaps else None
    failures = [task.summarise(arm).failure_rate * len(task.arms[arm].episodes) for task in tasks]
    episodes = sum(len(results.episodes) for results in own)
    selection = [mean(results.values("selection_score").ravel()) for results in own]
    below = [] if oracle is None else [-values for values in _gaps(tasks, arm, oracle)]
    shares = [regret.normalised for regret in known.get(arm, {}).values() if regret.normalised is not None]
    return ArmSummary(
        arm=arm,
        tasks=len(tasks),
        episodes=episodes,
        score=_estimate_of([results.values("score") for results in own], own, middle=False),
        gain=_estimate_of(gaps, own, middle=False) if gaps else None,
        middle_gain=None if every is None else float(interquartile_mean(every)),
        worst_gain=None if every is None else float(worst_tenth(every)),
        failure_rate=sum(failures) / episodes,
        selection_score=None if np.isnan(selection).any() else float(np.mean(selection)),
        regret=_estimate_of(below, own) if below else None,
        normalised=fmean(shares) if shares else None,
        normalised_tasks=len(shares),
    )


def _estimate_of(strata: Strata, arms: Sequence[ArmResults], *, middle: bool = True) -> Estimate:
    """Over tasks, of the interquartile mean or the mean of each; for few controllers, of these controllers."""
    statistic = interquartile_mean if middle else mean
    return estimate(strata, statistic, fixed_controllers=are_few_controllers(arms, len(strata)))


def _gaps(tasks: Sequence[TaskResults], ours: str, theirs: str) -> list[np.ndarray]:
    """Our score minus theirs on the same episode seeds, of each task that has both arms."""
    with_both = [task.arms for task in tasks if {ours, theirs} <= set(task.arms)]
    pairs = paired_values([arms[ours] for arms in with_both], [arms[theirs] for arms in with_both])
    return [mine - other for mine, other in zip(*pairs, strict=True)]


def regrets_by_family(tasks: Sequence[TaskResults], oracle: str | None) -> dict[str, dict[str, float]]:
    """The mean regret of each arm by family, in points; the lowest mean over all tasks first."""
    known = regrets_by_arm(tasks, oracle)
    families = sorted({task.family or task.name for task in tasks})
    found: dict[str, dict[str, float]] = {}
    for arm, by_task in sorted(known.items(), key=lambda item: fmean(each.points.value for each in item[1].values())):
        found[arm] = {}
        for family in families:
            own = [task.title for task in tasks if (task.family or task.name) == family and task.title in by_task]
            if own:
                found[arm][family] = fmean(by_task[title].points.value for title in own)
    return found


def tasks_without_use(tasks: Sequence[TaskResults], growth_gains: Mapping[str, float]) -> list[TaskResults]:
    """The tasks on which growth cannot help: where the best of some growing arms gains less than LEAST_GAIN."""
    return [task for task in tasks if growth_gains.get(task.host or "", LEAST_GAIN) < LEAST_GAIN]


def check_harm(tasks: Sequence[TaskResults], growth_gains: Mapping[str, float]) -> list[HarmCheck]:
    """Each arm minus the bare host on the tasks where growth cannot help; empty without such tasks."""
    own, found = tasks_without_use(tasks, growth_gains), []
    for name in dict.fromkeys(name for task in own for name in task.arms if name != BARE_HOST):
        gaps = _gaps(own, name, BARE_HOST)
        if gaps:
            found.append(HarmCheck(name, _estimate_of(gaps, [task.arms[name] for task in own if name in task.arms])))
    return sorted(found, key=lambda check: -check.difference.value)


def best_rule(summaries: Sequence[ArmSummary]) -> ArmSummary | None:
    """The rule for all tasks with the highest mean validation score, of those that ran on all tasks."""
    tasks = max((summary.tasks for summary in summaries), default=0)
    rules = [
        summary
        for summary in summaries
        if base_arm(summary.arm).partition("@")[0] in RULES_FOR_ALL_TASKS
        and summary.tasks == tasks
        and summary.selection_score is not None
    ]
    return max(rules, key=lambda summary: summary.selection_score or 0.0, default=None)
