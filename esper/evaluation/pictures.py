"""Arms against each other, as pictures."""

from collections.abc import Mapping

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from esper.evaluation.arms import ARMS
from esper.evaluation.results import Results
from esper.evaluation.statistics import estimate, profile

PALETTE = colormaps["tab20"].colors  # type: ignore[attr-defined]
THRESHOLDS = 200
DRAWS = 500  # for bands that are only looked at
AXES = {"parameters": ("parameters at the end", 1.0), "flops": ("GFLOPs of the whole episode", 1e-9)}


def colour(arm: str) -> tuple[float, float, float]:
    """The same for an arm in all pictures; the learned one stands out."""
    names = list(ARMS)
    picked: tuple[float, float, float] = (0.8, 0.1, 0.1) if arm == "ppo" else PALETTE[
        (names.index(arm) if arm in names else len(names)) % len(PALETTE)
    ]  # fmt: skip
    return picked


def frontier(arms: Mapping[str, Results]) -> Figure:
    """Score against parameters and against FLOPs: interquartile means, with their intervals on both axes."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for axes, (key, (label, factor)) in zip(panels, AXES.items(), strict=True):
        for name, results in arms.items():
            x, y = estimate([results.table(key) * factor]), estimate([results.table("score")])
            sides = {"xerr": [[x.value - x.low], [x.high - x.value]], "yerr": [[y.value - y.low], [y.high - y.value]]}
            axes.errorbar(x.value, y.value, **sides, fmt="o", color=colour(name), capsize=2, label=name)
            axes.annotate(name, (x.value, y.value), (5, 4), textcoords="offset points", fontsize=8)
        axes.set(xlabel=label, xscale="log")
        axes.margins(x=0.12)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("score")
    return figure


def profiles(arms: Mapping[str, Results]) -> Figure:
    """The share of episodes above each score."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes: Axes = figure.subplots()
    every = np.concatenate([results.table("score").ravel() for results in arms.values()])
    margin = 0.05 * (every.max() - every.min()) + 0.1
    thresholds = np.linspace(every.min() - margin, every.max() + margin, THRESHOLDS)
    for name, results in arms.items():
        shares, lows, highs = profile([results.table("score")], thresholds, draws=DRAWS)
        axes.plot(thresholds, shares, color=colour(name), label=name)
        axes.fill_between(thresholds, lows, highs, color=colour(name), alpha=0.12, linewidth=0)
    axes.set(xlabel="score", ylabel="share of episodes above", ylim=(0, 1.02))
    figure.legend(fontsize=8, loc="outside right upper")
    return figure
