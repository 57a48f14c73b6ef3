"""Settings that were trained from several seeds each, beside one another."""

from collections.abc import Sequence

import numpy as np

from esper.evaluation.document import Block, Table, Text, interval
from esper.evaluation.statistics import Estimate, difference, estimate, mean
from esper.evaluation.training import Training, alike
from esper.records import HELD_OUT


def repeated(runs: Sequence[Training]) -> list[Block]:
    """What each of several settings came to over its runs, and how far from the first; nothing for single runs."""
    groups: dict[str, list[Training]] = {}
    for run in runs:
        groups.setdefault(run.settings, []).append(run)
    if len(groups) < 2 or max(map(len, groups.values())) < 2:
        return []
    first, rows = next(iter(groups.values())), []
    for some in groups.values():
        held_out = [_last(some, kind) for kind in HELD_OUT]
        acting, usual = held_out[-1], _last(first, HELD_OUT[-1])
        worst = "-" if acting is None else f"{acting.min():.2f}"
        gap = "" if some is first else interval(_gap(acting, usual), "{:+.2f}")
        cells = [interval(None if scores is None else estimate([scores], mean)) for scores in (_ends(some), *held_out)]
        rows.append([", ".join(alike(some)) or "as it is", str(len(some)), *cells, worst, gap])
    what = HELD_OUT[-1]
    header = ("settings", "runs", "ends", *HELD_OUT, f"worst {what}", f"{what} - first")
    words = (
        "Each line is the mean over runs that differ in their seed alone, with its 95 % interval, of columns of the "
        "table before; the last is the difference from the first line, run by run where there are as many."
    )
    return [Table(header, rows), Text(words)]


def _last(runs: Sequence[Training], kind: str) -> np.ndarray | None:
    """The last held-out score of each run, [runs, 1]; None if any has none."""
    found = [run.known(f"validation/{kind}_{run.score.partition('/')[2]}")[1] for run in runs]
    return np.array([[scores[-1]] for scores in found]) if all(found) else None


def _ends(runs: Sequence[Training]) -> np.ndarray | None:
    found = [value for run in runs if (value := run.quarter(run.score, last=True)) is not None]
    return np.array(found)[:, None] if len(found) == len(runs) else None


def _gap(ours: np.ndarray | None, theirs: np.ndarray | None) -> Estimate | None:
    if ours is None or theirs is None:
        return None
    return difference([ours], [theirs if len(ours) == len(theirs) else mean(theirs.T)[None]])
