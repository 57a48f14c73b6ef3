"""Episodes that follow plans, for searches: they run once, and their scores and costs are read from a file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from esper.environment import Environment
from esper.evaluation.episode_store import EpisodeStore
from esper.evaluation.plans import Plan
from esper.evaluation.runner import EpisodeJob
from esper.records import EpisodeRecord

RunMissing = Callable[[Environment, EpisodeStore, Sequence[EpisodeJob]], None]  # runs the jobs that a store lacks


@dataclass(frozen=True)
class PlanEpisode:
    """One episode of a search."""

    plan: Plan
    episode_seed: int
    share: float = 1.0  # of the budget

    @cached_property
    def name(self) -> str:
        """Of its arm in the file."""
        return f"{self.plan.digest}, {self.share:g} of the budget"

    @property
    def key(self) -> tuple[str, int]:
        """The same for equal episodes."""
        return self.name, self.episode_seed


class PlanEpisodes:
    """The episodes of searches in one environment.

    Arguments:
        environment: that they run in
        store: that keeps them
        run_missing: runs the jobs that the store does not have
    """

    def __init__(self, environment: Environment, store: EpisodeStore, run_missing: RunMissing) -> None:
        self._environment, self._store, self._run_missing = environment, store, run_missing

    def scores(self, episodes: Sequence[PlanEpisode]) -> list[float]:
        """The validation score of each episode; the lowest for non-finite values."""
        distinct = {episode.key: episode for episode in episodes}
        self._run_missing(self._environment, self._store, [self._job(episode) for episode in distinct.values()])
        return [selection_score(record) for record in self._records(episodes)]

    def scores_of_jobs(self, jobs: Sequence[EpisodeJob]) -> list[float]:
        """The same of episodes that follow no plan; each job has one, and its name in the file is its arm."""
        self._run_missing(self._environment, self._store, jobs)
        return [selection_score(self._store.find(job.arm, job.episode_seeds[0])) for job in jobs]

    def cost(self, episodes: Sequence[PlanEpisode]) -> tuple[float, int]:
        """GFLOPs and number of some finished episodes, each counted once."""
        records = self._records(list({episode.key: episode for episode in episodes}.values()))
        return sum(record.flops for record in records) / 1e9, len(records)

    def _records(self, episodes: Sequence[PlanEpisode]) -> list[EpisodeRecord]:
        return [self._store.find(episode.name, episode.episode_seed) for episode in episodes]

    def _job(self, episode: PlanEpisode) -> EpisodeJob:
        plan, environment = episode.plan, self._environment
        controller = plan.controller(environment.space, environment.rules)
        start = replace(plan.start, budget=plan.start.budget * episode.share)
        return EpisodeJob(episode.name, None, (episode.episode_seed,), controller, start, episode.name)


def selection_score(episode: EpisodeRecord) -> float:
    """The score on validation, which choices may use; lowest for a network that ended with non-finite values."""
    return float("-inf") if episode.selection_score is None else episode.selection_score
