"""Headroom of a task distribution: how much the best plan of each task gains over the best plan for all tasks.

Without headroom there is nothing that a controller could learn. All plans are fixed before an episode starts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from esper.controllers import NoGrowth
from esper.environment import Environment
from esper.evaluation.episode_store import EpisodeStore
from esper.evaluation.runner import PLAN_PREFIX, EpisodeJob, digest
from esper.tasks import (
    LEAST_GAIN,
    FixedPlan,
    KnownTask,
    PlanScore,
    TaskSpec,
    refined_plans,
    screening_plans,
    task_digest,
)

HEADROOM_STREAM = "headroom"  # episode seeds; no evaluation and no training run has them
SEARCH_EPISODES = 2  # one for all plans, one more for finalists; those after them are fresh
NONE = FixedPlan()


@dataclass(frozen=True)
class TaskHeadroom:
    """The scores of one task, means over the same fresh episode seeds, which chose no plan."""

    spec: TaskSpec
    none: float
    fixed: float  # of the plan that is best on average over all tasks
    best: float  # of the task's own best plan
    plan: FixedPlan  # that plan
    fixed_plan: FixedPlan  # the plan that is best on average
    none_scores: tuple[float, ...]  # of all episodes without growth
    fresh: int  # episodes of each mean

    @property
    def headroom(self) -> float:
        return self.best - self.fixed

    @property
    def can_profit(self) -> bool:
        """Whether the best plan gains at least LEAST_GAIN points over no growth."""
        return self.best - self.none >= LEAST_GAIN

    def to_known(self) -> KnownTask:
        """For a shipped list of tasks."""
        scores = {self.plan: self.best, self.fixed_plan: self.fixed}
        plans = tuple(PlanScore(plan, round(score, 2), self.fresh) for plan, score in scores.items())
        none = tuple(round(score, 2) for score in self.none_scores)
        return KnownTask(self.spec.name, self.spec.family, self.spec.split, task_digest(self.spec), none, plans)


class HeadroomStudy:
    """Finds good fixed plans for each task of an environment, and one for all of them.

    All blueprints are screened in all slots and in the last, at one moment. Each task then tries plans near its two
    best blueprints, and near the two that are best on average. Finalists run once more, and what is chosen by these
    episodes is measured on fresh ones: else the luckiest plan would win, not the best.
    Episodes are kept in a file, and run only once.

    Arguments:
        environment: under a budget; evaluations draw its tasks
        specs: the tasks to study
        store: of the episodes
        on_step: called after each step of a round
        rng_seed: the episode seeds are derived from it
    """

    def __init__(
        self, environment: Environment, specs: Sequence[TaskSpec], store: EpisodeStore, on_step: Callable[[], None],
        rng_seed: int = 0,
    ) -> None:  # fmt: skip
        self._environment, self._store, self._on_step, self._rng_seed = environment, store, on_step, rng_seed
        self._specs = {spec.name: spec for spec in specs}

    def run(self, *, refine: bool, finalists: int, fresh: int) -> list[TaskHeadroom]:
        """The headroom of each task.

        Arguments:
            refine: whether to try more than one moment, and pairs of blueprints
            finalists: best plans of each task that run once more
            fresh: episodes of the chosen plans, which alone count
        """
        scores = self._search(refine)
        common = [plan for plan in scores[next(iter(scores))] if all(plan in own for own in scores.values())]
        fixed = max(common, key=lambda plan: fmean(own[plan] for own in scores.values()))
        last = {task: [NONE, fixed, *_best(own, own, finalists)] for task, own in scores.items()}
        again = self._measure(last, range(SEARCH_EPISODES))
        best = {task: _best(own, own, 1)[0] for task, own in again.items()}
        numbers = range(SEARCH_EPISODES, SEARCH_EPISODES + fresh)
        final = self._measure({task: [NONE, fixed, best[task]] for task in best}, numbers)
        return [
            TaskHeadroom(
                spec=self._specs[task],
                none=own[NONE],
                fixed=own[fixed],
                best=own[best[task]],
                plan=best[task],
                fixed_plan=fixed,
                none_scores=tuple(self._scores(task, NONE, range(numbers.stop))),
                fresh=fresh,
            )
            for task, own in final.items()
        ]

    def _search(self, refine: bool) -> dict[str, dict[FixedPlan, float]]:
        """The score of one episode of each plan that was tried, by task."""
        screening = screening_plans(self._environment.space.blueprints)
        scores = self._measure(dict.fromkeys(self._specs, screening), range(1))
        if not refine:
            return scores
        grown = screening[1:]
        average = {plan: fmean(own[plan] for own in scores.values()) for plan in grown}
        common = refined_plans(*_two_blueprints(average, grown))
        wanted = {
            task: [*screening, *common, *refined_plans(*_two_blueprints(own, grown))] for task, own in scores.items()
        }
        return self._measure(wanted, range(1))

    def _measure(self, plans: Mapping[str, Iterable[FixedPlan]], numbers: range) -> dict[str, dict[FixedPlan, float]]:
        """The mean validation score of some plans on each task; `numbers` are those of their episode seeds."""
        distinct = {task: list(dict.fromkeys(own)) for task, own in plans.items()}
        jobs = [self._job(task, plan, n) for n in numbers for task, own in distinct.items() for plan in own]
        self._store.run_missing(self._environment, jobs, lambda group: self._on_step(), test=False)
        return {
            task: {plan: fmean(self._scores(task, plan, numbers)) for plan in own} for task, own in distinct.items()
        }

    def _scores(self, task: str, plan: FixedPlan, numbers: range) -> list[float]:
        """The validation scores of finished episodes."""
        found = (self._store.find(plan.name, self._episode_seed(task, number)) for number in numbers)
        return [float("-inf") if each.selection_score is None else each.selection_score for each in found]

    def _job(self, task: str, plan: FixedPlan, number: int) -> EpisodeJob:
        episode_seed = self._episode_seed(task, number)
        start = plan.start(self._environment.host_pool.slot_names(episode_seed))
        inputs = digest({"start": start.to_dict(), "task": task_digest(self._specs[task])})
        controller = NoGrowth(self._environment.space)
        return EpisodeJob(plan.name, None, (episode_seed,), controller, start, PLAN_PREFIX + inputs)

    def _episode_seed(self, task: str, number: int) -> int:
        return self._environment.host_pool.episode_seed_of(task, HEADROOM_STREAM, self._rng_seed, number)


def _best(scores: Mapping[FixedPlan, float], plans: Iterable[FixedPlan], count: int) -> list[FixedPlan]:
    return sorted(plans, key=lambda plan: -scores[plan])[:count]


def _two_blueprints(scores: Mapping[FixedPlan, float], plans: Sequence[FixedPlan]) -> tuple[str, str]:
    """The best two blueprints of plans that have one each; of a single blueprint, twice that one."""
    ranked = list(dict.fromkeys(plan.blueprints[0][1] for plan in _best(scores, plans, len(plans))))
    return ranked[0], ranked[min(1, len(ranked) - 1)]
