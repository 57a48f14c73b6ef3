"""What a set of episodes says: means with intervals, as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

COLUMNS = {  # title -> (key of an episode, format, factor)
    "score": ("score", "{:.2f}", 1.0),
    "test": ("test_score", "{:.2f}", 1.0),
    "parameters": ("parameters", "{:,.0f}", 1.0),
    "GFLOPs": ("flops", "{:,.1f}", 1e-9),
    "fossilised": ("fossilized", "{:.1f}", 1.0),
    "pruned": ("pruned", "{:.1f}", 1.0),
    "seconds": ("seconds", "{:.1f}", 1.0),
}
BOOTSTRAPS = 2_000


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean; seeded."""
    sample = np.asarray(values, dtype=float)
    draws = np.random.default_rng(seed).choice(sample, (BOOTSTRAPS, len(sample)))
    low, high = np.quantile(draws.mean(1), (0.025, 0.975))
    return float(low), float(high)


def summarise(episodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of one controller's episodes, and the interval of its score."""
    means = {key: float(np.mean([episode[key] for episode in episodes])) for key, _, _ in COLUMNS.values()}
    low, high = interval([episode["score"] for episode in episodes])
    return {"episodes": len(episodes), **means, "score_low": low, "score_high": high}


def table(summaries: Mapping[str, Mapping[str, Any]], title: str) -> Table:
    """One row for each controller, best first."""
    shown = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for column in ("controller", "episodes", *COLUMNS):
        shown.add_column(column, justify="left" if column == "controller" else "right", no_wrap=True)
    for name, row in sorted(summaries.items(), key=lambda item: -item[1]["score"]):
        cells = {title: form.format(row[key] * factor) for title, (key, form, factor) in COLUMNS.items()}
        cells["score"] += f" [{row['score_low']:.2f}, {row['score_high']:.2f}]"
        shown.add_row(name, str(row["episodes"]), *cells.values())
    return shown
