"""python -m esper.report DIR...: tables and plots from finished episodes and training runs."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from esper.files import describe_os_error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m esper.report", description=__doc__)
    parser.add_argument(
        "places", nargs="+", metavar="DIR", help="of evaluations, training runs or sweeps; or a trained controller"
    )
    parser.add_argument("--out", type=Path, help="directory of the report; default: DIR if there is only one")
    parser.add_argument("--reference", help="the arm that the others are compared with")
    options = parser.parse_args(arguments)
    try:
        write_combined_report(options.places, options.out, options.reference)
    except OSError as error:
        sys.exit(describe_os_error(error))
    except ValueError as error:
        sys.exit(str(error))


def write_combined_report(places: Sequence[str], out: Path | None, reference: str | None) -> None:
    """One report of several directories or trained controllers."""
    from esper.evaluation.gather import gather_all, list_training_runs, select_episodes
    from esper.evaluation.output import make_console, write_results
    from esper.evaluation.provenance import merge_provenance

    sources = list(gather_all(places))
    episodes, runs = select_episodes(sources), list_training_runs(sources)
    if not episodes and not runs:
        raise ValueError(f"{', '.join(places)}: there are no finished episodes to report.")
    arms = {episode.arm for episode in episodes}
    if reference is not None and reference not in arms:
        allowed = f"one of {', '.join(sorted(arms))}" if arms else "left out, as there are no episodes to compare"
        raise ValueError(f"--reference {reference}: must be {allowed}.")
    provenance = merge_provenance([source.provenance for source in sources])
    if len(sources) > 1:
        provenance = replace(provenance, commands=[*provenance.commands, f"python {shlex.join(sys.orig_argv[1:])}"])
    if reference is not None:
        provenance = replace(provenance, reference=reference)
    single = Path(places[0]) if len(places) == 1 and Path(places[0]).is_dir() else None
    directory = out or single or Path("outputs") / "report" / f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    directory.mkdir(parents=True, exist_ok=True)
    write_results(episodes, provenance, directory, make_console(), runs)


if __name__ == "__main__":
    main()
