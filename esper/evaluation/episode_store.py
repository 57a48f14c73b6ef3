"""The episodes of an evaluation: read on resume, run where they are missing, written as they finish."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from esper.environment import Environment
from esper.evaluation.runner import EpisodeJob, EpisodeKey, group_jobs, run_jobs
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
        if path.exists():
            self.episodes, self.read_errors = read_episodes(path)

    @property
    def latest(self) -> list[EpisodeRecord]:
        return latest_episodes(self.episodes)

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
        """Run missing episodes, round after round; each round is written when it ends."""
        writer = LineWriter(self._path)
        try:
            for group in group_jobs(self.missing_jobs(jobs), environment.envs):
                records = run_jobs(
                    environment,
                    group,
                    self._shared_fields,
                    lambda group=group: on_step(group),  # type: ignore[misc]
                    test=test,
                )
                finished = self._finished_keys()
                new = [episode for episode in records if episode_key(episode) not in finished]
                writer.write(*(episode.to_dict() for episode in new))
                self.episodes += new
        finally:
            writer.close()

    def _finished_keys(self) -> set[EpisodeKey]:
        return {episode_key(episode) for episode in self.latest}  # an older episode with other inputs does not count


def latest_episodes(episodes: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """The last record of each episode; an episode runs again when its inputs have changed."""
    return list({episode_key(episode)[:3]: episode for episode in episodes}.values())


def episode_key(episode: EpisodeRecord) -> EpisodeKey:
    return episode.arm, episode.checkpoint, episode.episode_seed, episode.inputs_digest
