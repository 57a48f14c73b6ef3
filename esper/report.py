"""python -m esper.report DIR...: tables and pictures from episodes that have been played."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from esper.evaluation.conclude import conclude, told
from esper.evaluation.played import latest
from esper.evaluation.report import Source
from esper.records import salvage

WIDTH = 120  # columns of what is printed into a file
HELD_OUT = ("greedy", "sampled")  # episodes of a training run that can be compared: played on seeds it never learns on


def gather(directory: Path) -> tuple[list[dict[str, Any]], Source]:
    """The episodes of an evaluation or of a training run, and how they came about."""
    path = directory / "episodes.jsonl"
    if not path.is_file():
        raise ValueError(f"{directory}: holds no episodes.jsonl; it must be the directory of an evaluation or a run.")
    lines, complaints = salvage(path)
    if not any("kind" in line for line in lines):
        about = told(directory)
        return latest(lines), Source(**{**about, "remarks": [*complaints, *about.get("remarks", [])]})
    typed = directory / ".hydra" / "overrides.yaml"
    overrides = OmegaConf.to_container(OmegaConf.load(typed)) if typed.is_file() else []
    command = f"python -m esper.run {shlex.join(map(str, overrides if isinstance(overrides, list) else []))}"
    return _last_held_out(lines, directory), Source(commands=[command], remarks=complaints)


def _last_held_out(lines: Sequence[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    """A training run's latest episodes on seeds that it never learns on, as arms of their own."""
    settings, hydra = directory / ".hydra" / "config.yaml", directory / ".hydra" / "hydra.yaml"
    config = OmegaConf.to_container(OmegaConf.load(settings), resolve=True) if settings.is_file() else {}
    choices = OmegaConf.select(OmegaConf.load(hydra), "hydra.runtime.choices") if hydra.is_file() else None
    own = {"config": config, "learner": str(directory), "host": choices["host"] if choices else "a host"}
    held_out = [line for line in lines if line.get("kind") in HELD_OUT]
    last = max((line["round"] for line in held_out), default=0)
    return [{**line, **own, "controller": f"ppo, {line['kind']}"} for line in held_out if line["round"] == last]


def merged(sources: Sequence[Source]) -> Source:
    """Several runs' tellings as one."""
    references = {source.reference for source in sources if source.reference}
    return Source(
        commands=list(dict.fromkeys(command for source in sources for command in source.commands)),
        versions={name: value for source in reversed(sources) for name, value in source.versions.items()},
        learners={label: about for source in sources for label, about in source.learners.items()},
        remarks=list(dict.fromkeys(remark for source in sources for remark in source.remarks)),
        reference=references.pop() if len(references) == 1 else None,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m esper.report", description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="of evaluations or training runs")
    parser.add_argument("--out", type=Path, help="where the report goes; the directory itself if there is only one")
    parser.add_argument("--reference", help="the arm that the others are compared with")
    given = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    try:
        found = [gather(directory) for directory in dict.fromkeys(map(Path.resolve, given.directories))]
        lines = [line for some, _ in found for line in some]
        if not lines:
            raise ValueError(f"{', '.join(map(str, given.directories))}: there are no finished episodes to report.")
        played = {line["controller"] for line in lines}
        if given.reference is not None and given.reference not in played:
            raise ValueError(f"--reference {given.reference}: was not played; there are {', '.join(sorted(played))}.")
        source = merged([source for _, source in found])
        if len(found) > 1:
            source = replace(source, commands=[*source.commands, f"python {shlex.join(sys.orig_argv[1:])}"])
        if given.reference is not None:
            source = replace(source, reference=given.reference)
        alone = given.directories[0] if len(given.directories) == 1 else None
        directory = given.out or alone or Path("outputs") / "report" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
        directory.mkdir(parents=True, exist_ok=True)
        conclude(lines, source, directory, console)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}.")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
