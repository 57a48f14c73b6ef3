"""Settings that were trained from several seeds each, beside one another."""

from collections.abc import Sequence

import numpy as np

from esper.evaluation.document import Block, Table, Text, interval
from esper.evaluation.statistics import Estimate, estimate, mean
from esper.evaluation.training import Training, named
from esper.records import HELD_OUT

ACTS = HELD_OUT[-1]  # as a policy does while it learns


def repeated(runs: Sequence[Training]) -> list[Block]:
    """What each of several settings came to over its runs, for each task; nothing where none was trained again."""
    tasks: dict[tuple[str, str], dict[str, list[Training]]] = {}
    for run in runs:
        tasks.setdefault((run.task, run.score), {}).setdefault(run.settings, []).append(run)
    several = [groups for groups in tasks.values() if len(groups) > 1 and max(map(len, groups.values())) > 1]
    words = (
        "Each line is the mean over runs that differ in their seed alone, with its 95 % interval, of columns of the "
        "table before; the last is the difference from the first line, run by run; where they are not as many runs, "
        "it is that of the means, without an interval."
    )
    header = ("settings", "runs", "ends", *HELD_OUT, f"worst {ACTS}", f"{ACTS} - first")
    tables = [Table(header, _rows(groups)) for groups in several]
    return [*tables, Text(words)] if tables else []


def _rows(groups: dict[str, list[Training]]) -> list[list[str]]:
    names = named([(settings, settings.split()) for settings in groups])
    first, rows = next(iter(groups.values())), []
    for name, some in zip(names, groups.values(), strict=True):
        held_out = [_last(some, kind) for kind in HELD_OUT]
        cells = [interval(_mean(scores)) for scores in (_ends(some), *held_out)]
        worst = "-" if held_out[-1] is None else f"{held_out[-1].min():.2f}"
        gap = "" if some is first else _gap(held_out[-1], _last(first, ACTS))
        rows.append([name, str(len(some)), *cells, worst, gap])
    return rows


def _last(runs: Sequence[Training], kind: str) -> np.ndarray | None:
    """The last held-out score of each run, [runs, 1]; None if any has none."""
    found = [run.known(f"validation/{kind}_{run.score.partition('/')[2]}")[1] for run in runs]
    return np.array([[scores[-1]] for scores in found]) if all(found) else None


def _ends(runs: Sequence[Training]) -> np.ndarray | None:
    found = [value for run in runs if (value := run.quarter(run.score, last=True)) is not None]
    return np.array(found)[:, None] if len(found) == len(runs) else None


def _mean(scores: np.ndarray | None) -> Estimate | None:
    return None if scores is None else estimate([scores], mean)


def _gap(ours: np.ndarray | None, theirs: np.ndarray | None) -> str:
    if ours is None or theirs is None:
        return "-"
    if len(ours) != len(theirs):
        return f"{ours.mean() - theirs.mean():+.2f}"
    return interval(_mean(ours - theirs), "{:+.2f}")
