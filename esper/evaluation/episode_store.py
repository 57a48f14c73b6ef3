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
        known: record fields that all new episodes share
    """

    def __init__(self, path: Path, **known: Any) -> None:
        self._path, self._known = path, known
        self.all: list[EpisodeRecord] = []
        self.complaints: list[str] = []
        if path.exists():
            self.all, self.complaints = read_episodes(path)

    @property
    def latest(self) -> list[EpisodeRecord]:
        return latest_episodes(self.all)

    def missing(self, jobs: Sequence[EpisodeJob]) -> list[EpisodeJob]:
        """Those with an episode that has not finished."""
        done = self._done()
        return [job for job in jobs if not done.issuperset(job.keys)]

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
            for some in group_jobs(self.missing(jobs), environment.envs):
                found = run_jobs(environment, some, self._known, lambda some=some: on_step(some), test=test)  # type: ignore[misc]
                done = self._done()
                new = [line for line in found if episode_key(line) not in done]
                writer.write(*(line.to_dict() for line in new))
                self.all += new
        finally:
            writer.close()

    def _done(self) -> set[EpisodeKey]:
        return {episode_key(line) for line in self.latest}  # an older episode with other inputs does not count


def latest_episodes(lines: Sequence[EpisodeRecord]) -> list[EpisodeRecord]:
    """The last record of each episode; it runs again when its inputs have changed."""
    return list({episode_key(line)[:3]: line for line in lines}.values())


def episode_key(line: EpisodeRecord) -> EpisodeKey:
    return line.arm, line.checkpoint, line.episode_seed, line.inputs_digest
