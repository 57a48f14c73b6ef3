"""The search for best_open_loop without a budget: many random schedules, one episode each on every host."""

from dataclasses import dataclass
from pathlib import Path

from esper.controllers import ScheduleController, ScheduleEntry, random_schedule
from esper.environment import Environment, EpisodeStart
from esper.evaluation.episode_store import EpisodeStore
from esper.evaluation.plan_episodes import RunMissing, selection_score
from esper.evaluation.runner import EpisodeJob
from esper.rng import derive_seed


@dataclass(frozen=True)
class ScheduleSearch:
    """The result of a random search for a schedule."""

    best: list[ScheduleEntry]
    count: int  # schedules that were tried
    gflops: float  # of all their episodes
    hosts: int

    def describe(self, trained_for: int) -> str:
        """The result and cost as a sentence; `trained_for` is the number of training episodes of the controllers."""
        entries = sorted(self.best, key=lambda entry: entry.at)
        plan = "; ".join(f"{e.blueprint[0]} in {e.slot} at step {e.at:.0f}, blended by {e.blend}" for e in entries)
        episodes = self.count * self.hosts
        fewer = f" (fewer than the {trained_for} training episodes of the controller)" if episodes < trained_for else ""
        each = f", each on {self.hosts} hosts" if episodes > self.count else ""
        return (
            f"best_open_loop is the best of {self.count} random schedules{each}{fewer}; the search took "
            f"{self.gflops:,.0f} GFLOPs, which are not part of any episode's cost: {plan or 'no growth'}."
        )


def search_schedules(
    environment: Environment,
    episodes: int,
    seed: int,
    path: Path,
    run_missing: RunMissing,
) -> ScheduleSearch:
    """Find the random schedule with the highest validation score, over one episode on each host.

    Arguments:
        environment: that episodes run in
        episodes: of the whole search
        seed: that schedules and episode seeds are derived from
        path: of the episodes; those in it do not run again
        run_missing: runs the jobs that a store does not have
    """
    space, steps, pool = environment.space, environment.steps, environment.host_pool
    count = max(1, episodes // len(pool))
    episode_seeds = [pool.episode_seeds("schedule", seed, index) for index in range(count)]
    schedules = [random_schedule(space, steps, derive_seed("schedule", seed, index)) for index in range(count)]
    store = EpisodeStore(path)
    jobs = [
        EpisodeJob("search", None, (episode_seed,), ScheduleController(space, schedule), EpisodeStart(), "random")
        for schedule, own_seeds in zip(schedules, episode_seeds, strict=True)
        for episode_seed in own_seeds
    ]
    run_missing(environment, store, jobs)
    by_seed = {episode.episode_seed: episode for episode in store.latest}
    tried = [[by_seed[episode_seed] for episode_seed in own_seeds] for own_seeds in episode_seeds]
    best = max(range(count), key=lambda index: sum(selection_score(episode) for episode in tried[index]))
    gflops = sum(episode.flops for own in tried for episode in own) / 1e9
    return ScheduleSearch(schedules[best], count, gflops, len(pool))
