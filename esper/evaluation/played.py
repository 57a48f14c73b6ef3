"""The episodes of an evaluation: read where it goes on, written as they are finished, played where they are missing."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.environment import Environment
from esper.evaluation.runner import Job, Key, play, rounds
from esper.records import Writer, salvage


class Played:
    """Episodes in a file.

    Arguments:
        path: of the file; what is in it is not played again
        about: plain data for every new line
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path, self._about = path, about
        self.all: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        if path.exists():
            self.all, self.complaints = salvage(path)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return latest(self.all)

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of which any episode has not been played."""
        done = self._done()
        return [job for job in jobs if not done.issuperset(job.keys)]

    def play(
        self, environment: Environment, jobs: Sequence[Job], on_step: Callable[[Sequence[Job]], None], *, test: bool
    ) -> None:
        """Play what is missing, round after round; each is written as soon as it is over."""
        writer = Writer(self._path)
        try:
            for some in rounds(self.missing(jobs), environment.envs):
                found = play(environment, some, self._about, lambda some=some: on_step(some), test=test)  # type: ignore[misc]
                done = self._done()
                new = [line for line in found if key_of(line) not in done]
                writer.write(*new)
                self.all += new
        finally:
            writer.close()

    def _done(self) -> set[Key]:
        return {key_of(line) for line in self.lines}  # an older one of another origin is not what is wanted


def latest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """An episode that was played again, because what it is made from had changed, counts as it was played last."""
    return list({key_of(line)[:3]: line for line in lines}.values())


def key_of(line: Mapping[str, Any]) -> Key:
    return line["controller"], line.get("learner"), line["seed"], line.get("origin", "")
