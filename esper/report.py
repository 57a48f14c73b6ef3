"""python -m esper.report DIR...: tables and pictures from episodes that have been played, and from training."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.console import Console

from esper.evaluation.gather import compared_episodes, gather_all, merge_provenance, training_runs
from esper.evaluation.output import write_results

WIDTH = 120  # columns of what is printed into a file


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
        found = list(gather_all(given.places))
        lines, runs = compared_episodes(found), training_runs(found)
        if not lines and not runs:
            raise ValueError(f"{', '.join(given.places)}: there are no finished episodes to report.")
        arms = {line.arm for line in lines}
        if given.reference is not None and given.reference not in arms:
            known = ", ".join(sorted(arms)) or "no episodes"
            raise ValueError(f"--reference {given.reference}: has no episodes; there are {known}.")
        provenance = merge_provenance([each.provenance for each in found])
        if len(found) > 1:
            provenance = replace(provenance, commands=[*provenance.commands, f"python {shlex.join(sys.orig_argv[1:])}"])
        if given.reference is not None:
            provenance = replace(provenance, reference=given.reference)
        single = Path(given.places[0]) if len(given.places) == 1 and Path(given.places[0]).is_dir() else None
        directory = given.out or single or Path("outputs") / "report" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
        directory.mkdir(parents=True, exist_ok=True)
        write_results(lines, provenance, directory, console, runs)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}.")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
