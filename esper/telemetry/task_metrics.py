"""What a controller gains on the tasks of a distribution, by family, compared with what is known of them."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from esper.environment import HostTask
from esper.records import EpisodeRecord


def task_metrics(episodes: Sequence[EpisodeRecord], tasks: Mapping[str, HostTask]) -> dict[str, float]:
    """Means over the tasks of a round, each of which counts once; NaN is not measured.

    Scores are validation scores, without rent. A task whose scores are not known counts for `tasks/grew` only. Every
    round of a run has the same names; there are none without a task distribution.

    Arguments:
        episodes: of one round
        tasks: all tasks by name
    """
    families = list(dict.fromkeys(task.family for task in tasks.values() if task.family))
    if not families:
        return {}
    by_task: dict[str, list[EpisodeRecord]] = {}
    for each in episodes:
        by_task.setdefault(each.host or next(iter(tasks)), []).append(each)
    known = {name: task.known for name, task in tasks.items() if task.known is not None}
    best = {name: scores.best for name, scores in known.items() if scores.best is not None}
    grew = {name: fmean(bool(each.fossils) for each in own) for name, own in by_task.items()}
    scores = {name: score for name, own in by_task.items() if (score := _mean_score(own)) is not None}
    gain = {name: score - known[name].none for name, score in scores.items() if name in known}
    metrics = {"tasks/grew": _mean(grew)}
    if known:
        metrics["tasks/gain"] = _mean(gain)
    if best:
        metrics["tasks/regret"] = _mean({name: best[name] - score for name, score in scores.items() if name in best})
    for family in families:
        own_tasks = [name for name, task in tasks.items() if task.family == family]
        metrics[f"tasks/grew_{family}"] = _mean(grew, own_tasks)
        if not known.keys().isdisjoint(own_tasks):
            metrics[f"tasks/gain_{family}"] = _mean(gain, own_tasks)
    return metrics


def _mean_score(episodes: Sequence[EpisodeRecord]) -> float | None:
    """The mean validation score at the end of episodes; None if none has one."""
    scores = [each.steps[-1].score for each in episodes]
    finite = [score for score in scores if score is not None]
    return fmean(finite) if finite else None


def _mean(values: Mapping[str, float], names: Sequence[str] | None = None) -> float:
    """The mean over tasks, or over those with some names; NaN if there are none."""
    chosen = [value for name, value in values.items() if names is None or name in names]
    return fmean(chosen) if chosen else float("nan")
