"""The episodes of an evaluation: read on resume, run where they are missing, written as they finish."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from esper.environment import Environment
from esper.evaluation.runner import EpisodeJob, EpisodeKey, group_jobs, is_plan, run_jobs
from esper.records import EpisodeRecord, LineWriter, read_episodes


class EpisodeStore:
    """Episodes in a file.

    Arguments:
        path: of the file; episodes in it do not run again
        shared_fields: record fields that have the same value in all new episodes
    """

    def __init__(self, path: Path, **shared_fields: Any) -> None:
        self._path, self._shared_fields = path, shared_fields
        self.episodes: list[EpisodeRecord] = []
        self.read_errors: list[str] = []  # a sentence for each line of the file that cannot be read
        self._by_arm: dict[tuple[str, int], EpisodeRecord] = {}  # of the first self._indexed episodes
        self._indexed = 0
        if path.exists():
            self.episodes, self.read_errors = read_episodes(path)

    @property
    def latest(self) -> list[EpisodeRecord]:
        return latest_episodes(self.episodes)

    def find(self, arm: str, episode_seed: int) -> EpisodeRecord:
        """The finished episode of an arm without a trained controller."""
        for episode in self.episodes[self._indexed :]:
            self._by_arm[episode.arm, episode.episode_seed] = episode
        self._indexed = len(self.episodes)
        return self._by_arm[arm, episode_seed]

    def missing_jobs(self, jobs: Sequence[EpisodeJob]) -> list[EpisodeJob]:
        """Jobs with an unfinished episode."""
        finished = self._finished_keys()
        return [job for job in jobs if not finished.issuperset(job.keys)]

    def run_missing(
        self,
        environment: Environment,
        jobs: Sequence[EpisodeJob],
        on_step: Callable[[Sequence[EpisodeJob]], None],
        *,
        test: bool,
    ) -> None:
        """Run missing episodes, round after round; each round is written when it ends.

        Arms with the same plan have the same episodes: these run once, and each arm gets a copy.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        writer = LineWriter(self._path)
        try:
            self._copy_plans(jobs, writer)
            for group in group_jobs(self.distinct_jobs(jobs), environment.envs):
                records = run_jobs(
                    environment,
                    group,
                    self._shared_fields,
                    lambda group=group: on_step(group),  # type: ignore[misc]
                    test=test,
                )
                finished = self._finished_keys()
                new = [episode for episode in records if episode_key(episode) not in finished]
                self._add(new, writer)
            self._copy_plans(jobs, writer)
        finally:
            writer.close()

    def distinct_jobs(self, jobs: Sequence[EpisodeJob]) -> list[EpisodeJob]:
        """Jobs with an unfinished episode, of each plan only one that no other arm has run."""
        done: set[tuple[str, tuple[int, ...]]] = {(e.inputs_digest, (e.episode_seed,)) for e in self.latest}
        distinct = []
        for job in self.missing_jobs(jobs):
            content = (job.inputs_digest, job.episode_seeds)
            if not is_plan(job.inputs_digest) or content not in done:
                done.add(content)
                distinct.append(job)
        return distinct

    def _copy_plans(self, jobs: Sequence[EpisodeJob], writer: LineWriter) -> None:
        """Finish the episodes of plans that another arm has run."""
        by_content = {(e.inputs_digest, e.episode_seed): e for e in self.latest if is_plan(e.inputs_digest)}
        missing = [(job, by_content.get((job.inputs_digest, job.episode_seeds[0]))) for job in self.missing_jobs(jobs)]
        self._add([replace(episode, arm=job.arm) for job, episode in missing if episode is not None], writer)

    def _add(self, episodes: Sequence[EpisodeRecord], writer: LineWriter) -> None:
        writer.write(*(episode.to_dict() for episode in episodes))
        self.episodes += episodes

    def _finished_keys(self) -> set[EpisodeKey]:
        return {episode_key(episode) for episode in self.latest}  # an older episode with other inputs does not count


def latest_episodes(episodes: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """The last record of each episode; an episode runs again when its inputs have changed."""
    return list({episode_key(episode)[:3]: episode for episode in episodes}.values())


def episode_key(episode: EpisodeRecord) -> EpisodeKey:
    return episode.arm, episode.checkpoint, episode.episode_seed, episode.inputs_digest
