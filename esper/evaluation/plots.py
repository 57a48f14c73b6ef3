"""Arms against each other, as pictures."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from esper.evaluation.arms import ARMS
from esper.evaluation.results import ArmResults, final_score
from esper.evaluation.statistics import estimate, profile

PALETTE = colormaps["tab20"].colors  # type: ignore[attr-defined]
MARKERS = "os^vDPX<>hp8"
THRESHOLDS = 200
DRAWS = 500  # for bands that are only looked at
AXES = {"parameters": ("parameters at the end", 1.0), "flops": ("GFLOPs of the whole episode", 1e-9)}


def look(arm: str) -> dict[str, Any]:
    """Colour and marker of an arm, the same in all pictures; the learned one stands out."""
    names = [name for name in ARMS if name != "ppo"]
    if arm == "ppo":
        return {"color": "black", "marker": "*", "markersize": 12}
    place = names.index(arm) if arm in names else len(names) + len(arm)
    return {"color": PALETTE[place % len(PALETTE)], "marker": MARKERS[place % len(MARKERS)], "markersize": 6}


def frontier(arms: Mapping[str, ArmResults]) -> Figure:
    """Score against parameters and against FLOPs: interquartile means, with their intervals on both axes."""
    figure = Figure(figsize=(12.5, 5), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for axes, (key, (label, factor)) in zip(panels, AXES.items(), strict=True):
        for name, results in arms.items():
            x, y = estimate([results.table(key) * factor]), estimate([results.table("score")])
            sides = {"xerr": [[x.value - x.low], [x.high - x.value]], "yerr": [[y.value - y.low], [y.high - y.value]]}
            axes.errorbar(x.value, y.value, **sides, linestyle="", capsize=2, label=name, **look(name))
        axes.set(xlabel=label, xscale="log")
        axes.margins(x=0.12)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("score")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


def profiles(arms: Mapping[str, ArmResults], main: str) -> Figure:
    """The share of episodes above each score, and the band of one arm."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes: Axes = figure.subplots()
    every = [final_score(line) for results in arms.values() for line in results.lines.values()]
    margin = 0.05 * (max(every) - min(every)) + 0.1
    thresholds = np.linspace(min(every) - margin, max(every) + margin, THRESHOLDS)
    for name, results in arms.items():
        shares, lows, highs = profile([results.table("score")], thresholds, draws=DRAWS)
        shade = look(name)["color"]
        axes.plot(thresholds, shares, color=shade, label=name, linewidth=2.5 if name == main else 1.2)
        if name == main:
            axes.fill_between(thresholds, lows, highs, color=shade, alpha=0.15, linewidth=0)
    axes.set(xlabel="score", ylabel="share of episodes above", ylim=(0, 1.02))
    figure.legend(fontsize=8, loc="outside right upper")
    return figure
