"""python -m esper.report DIR...: tables and pictures from episodes that have been played, and from training."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from esper.config import grows
from esper.evaluation.conclude import conclude, told
from esper.evaluation.played import latest
from esper.evaluation.report import Source
from esper.evaluation.training import Training, named
from esper.learners import ELSEWHERE, PRETRAINED, locate, origin_of
from esper.records import HELD_OUT, read_rounds, salvage
from esper.resume import key_of, overrides_of, presets, read_yaml, runs_in

RECORDS = ("episodes.jsonl", "rounds.jsonl")
SEPARATE = ("seed", *ELSEWHERE)  # keys in which runs may differ and still be repetitions of one another
WIDTH = 120  # columns of what is printed into a file


@dataclass(frozen=True)
class Run:
    """A training run: what it was started with, and its lines of rounds.jsonl."""

    task: str
    overrides: Sequence[str]
    rounds: Sequence[Mapping[str, Any]]

    @property
    def settings(self) -> str:
        """All that was typed but for the seed."""
        return " ".join(sorted(override for override in self.overrides if key_of(override) not in SEPARATE))

    @property
    def seed(self) -> str:
        return next((o.partition("=")[2] for o in reversed(self.overrides) if key_of(o) == "seed"), "")


@dataclass(frozen=True)
class Found:
    """What a directory holds: episodes and how they came about, and the run, if it is one's."""

    directory: Path
    episodes: Sequence[dict[str, Any]]
    source: Source
    run: Run | None = None


def gather(directory: Path) -> Found:
    """What an evaluation or a training run has left in its directory."""
    path, rounds = (directory / name for name in RECORDS)
    if not path.is_file() and not rounds.is_file():
        raise ValueError(
            f"{directory}: holds no episodes.jsonl or rounds.jsonl; it must be the directory of an evaluation or a run."
        )
    lines, complaints = salvage(path) if path.is_file() else ([], [])
    if not rounds.is_file() and not any("kind" in line for line in lines):
        about = told(directory)
        return Found(directory, latest(lines), Source(**{**about, "remarks": [*complaints, *about.get("remarks", [])]}))
    overrides, config = overrides_of(directory), read_yaml(directory / ".hydra" / "config.yaml") or OmegaConf.create()
    name, hosts = config.get("name", "a run"), "environment" not in config or grows(config)
    run = Run(f"{name}, {presets(directory)}" if hosts else name, overrides, read_rounds(rounds))
    source = Source(commands=[f"python -m esper.run {shlex.join(overrides)}"], remarks=complaints)
    own = {
        "config": OmegaConf.to_container(config, resolve=True),
        "learner": str(directory),
        "rule": run.settings,
    }
    host = presets(directory).partition(" on ")[0]  # unless an episode has drawn one
    return Found(directory, [{"host": host, **line, **own} for line in _last_held_out(lines)], source, run)


def recalled(name: str) -> Found:
    """How a trained controller was trained, as its file tells."""
    origin = origin_of(locate(name))
    run = Run(f"{origin.config.get('name', 'a run')}, {origin.trained_on}", origin.overrides, origin.rounds)
    return Found(Path(name), [], Source(commands=[f"python -m esper.run {shlex.join(origin.overrides)}"]), run)


def gathered(places: Sequence[str]) -> Iterator[Found]:
    """What all hold, each once; jobs of a sweep that have left nothing are only remarked."""
    seen = set()
    for place in places:
        if place in PRETRAINED or Path(place).is_file():
            yield recalled(place)
            continue
        jobs = runs_in(Path(place))
        for job in jobs:
            if job.resolve() in seen:
                continue
            seen.add(job.resolve())
            if len(jobs) > 1 and not any((job / name).is_file() for name in RECORDS):
                yield Found(job, [], Source(remarks=[f"{job}: has left no records; it is left out."]))
            else:
                yield gather(job.resolve())


def _last_held_out(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A training run's latest episodes on seeds that it never learns on, as arms of their own.

    Each run has held-out seeds of its own, so they are told by their number: a table of several runs has no gaps.
    """
    held_out = [line for line in lines if line.get("kind") in HELD_OUT]
    last = max((line["round"] for line in held_out), default=0)
    latest = [line for line in held_out if line["round"] == last]
    numbers: dict[Any, dict[int, int]] = {}  # by host, where episodes draw theirs
    for line in latest:
        own = numbers.setdefault(line.get("host"), {})
        own.setdefault(line["seed"], len(own))
    return [{**line, "seed": numbers[line.get("host")][line["seed"]]} for line in latest]


def learned(found: Sequence[Found]) -> list[Training]:
    """The training runs among what was found, each called by what sets it apart from the others."""
    runs = [(str(each.directory), each.run) for each in found if each.run is not None and each.run.rounds]
    names = named([(directory, run.overrides) for directory, run in runs])
    return [
        Training(name, run.task, run.rounds, run.settings, run.seed) for name, (_, run) in zip(names, runs, strict=True)
    ]


def compared(found: Sequence[Found]) -> list[dict[str, Any]]:
    """The episodes that arms are compared by: those of evaluations, and only if there are none, those of runs."""
    evaluations = [each for each in found if each.run is None and each.episodes]
    if evaluations:
        return [line for each in evaluations for line in each.episodes]
    runs = [(each.run.settings, each) for each in found if each.run is not None]
    several = list(dict.fromkeys(settings for settings, _ in runs))
    names = dict(zip(several, named([(settings, settings.split()) for settings in several]), strict=True))
    return [
        {**line, "controller": f"{names[settings] if len(several) > 1 else 'ppo'}, {line['kind']}"}
        for settings, each in runs
        for line in each.episodes
    ]


def merged(sources: Sequence[Source]) -> Source:
    """Several runs' tellings as one."""
    references = {source.reference for source in sources if source.reference}
    return Source(
        commands=list(dict.fromkeys(command for source in sources for command in source.commands)),
        versions={name: value for source in reversed(sources) for name, value in source.versions.items()},
        learners={label: about for source in sources for label, about in source.learners.items()},
        remarks=list(dict.fromkeys(remark for source in sources for remark in source.remarks)),
        reference=references.pop() if len(references) == 1 else None,
        searched=max((source.searched for source in sources if source.searched), default=None),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m esper.report", description=__doc__)
    parser.add_argument(
        "places", nargs="+", metavar="DIR", help="of evaluations, training runs or sweeps; or a trained controller"
    )
    parser.add_argument("--out", type=Path, help="where the report goes; the directory itself if there is only one")
    parser.add_argument("--reference", help="the arm that the others are compared with")
    given = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        found = list(gathered(given.places))
        lines, runs = compared(found), learned(found)
        if not lines and not runs:
            raise ValueError(f"{', '.join(given.places)}: there are no finished episodes to report.")
        played = {line["controller"] for line in lines}
        if given.reference is not None and given.reference not in played:
            there = ", ".join(sorted(played)) or "no episodes"
            raise ValueError(f"--reference {given.reference}: was not played; there are {there}.")
        source = merged([each.source for each in found])
        if len(found) > 1:
            source = replace(source, commands=[*source.commands, f"python {shlex.join(sys.orig_argv[1:])}"])
        if given.reference is not None:
            source = replace(source, reference=given.reference)
        alone = Path(given.places[0]) if len(given.places) == 1 and Path(given.places[0]).is_dir() else None
        directory = given.out or alone or Path("outputs") / "report" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
        directory.mkdir(parents=True, exist_ok=True)
        conclude(lines, source, directory, console, runs)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}.")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
