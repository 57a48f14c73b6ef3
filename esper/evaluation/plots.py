"""Plots that compare arms."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from esper.evaluation.arms import ARMS, base_name
from esper.evaluation.results import ArmResults, final_score
from esper.evaluation.statistics import estimate, performance_profile

ARM_COLORS = colormaps["tab20"].colors  # type: ignore[attr-defined]
ARM_MARKERS = "os^vDPX<>hp8"
THRESHOLDS = 200
COST_AXES = {"parameters": ("parameters at the end", 1.0), "flops": ("GFLOPs of the whole episode", 1e-9)}


def arm_style(arm: str) -> dict[str, Any]:
    """Colour and marker of an arm, the same in all plots; the learned controller stands out.

    An arm with a number in its name has the colour of the arm without it, and an empty marker.
    """
    names = [name for name in ARMS if name != "ppo"]
    if arm == "ppo":
        return {"color": "black", "marker": "*", "markersize": 12}
    base = base_name(arm)
    index = names.index(base) if base in names else len(names) + len(base)
    return {
        "color": ARM_COLORS[index % len(ARM_COLORS)],
        "marker": ARM_MARKERS[index % len(ARM_MARKERS)],
        "markersize": 6,
        **({} if base == arm else {"markerfacecolor": "white"}),
    }


def plot_frontier(arms: Mapping[str, ArmResults]) -> Figure:
    """Score against parameters and against FLOPs: interquartile means with intervals on both axes."""
    figure = Figure(figsize=(12.5, 5), layout="constrained")
    panels = figure.subplots(1, len(COST_AXES), sharey=True)
    for axes, (name, (label, factor)) in zip(panels, COST_AXES.items(), strict=True):
        for arm, results in arms.items():
            x, y = estimate([results.values(name) * factor]), estimate([results.values("score")])
            errors = {"xerr": [[x.value - x.low], [x.high - x.value]], "yerr": [[y.value - y.low], [y.high - y.value]]}
            axes.errorbar(x.value, y.value, **errors, linestyle="", capsize=2, label=arm, **arm_style(arm))
        axes.set(xlabel=label, xscale="log")
        axes.margins(x=0.12)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.2)
    panels[0].set_ylabel("score")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


def plot_profiles(arms: Mapping[str, ArmResults], main: str) -> Figure:
    """The share of episodes above each score, with the band of one arm."""
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes: Axes = figure.subplots()
    scores = [final_score(episode) for results in arms.values() for episode in results.episodes]
    margin = 0.05 * (max(scores) - min(scores)) + 0.1
    thresholds = np.linspace(min(scores) - margin, max(scores) + margin, THRESHOLDS)
    for name, results in arms.items():
        shares, lows, highs = performance_profile([results.values("score")], thresholds)
        color = arm_style(name)["color"]
        axes.plot(thresholds, shares, color=color, label=name, linewidth=2.5 if name == main else 1.2)
        if name == main:
            axes.fill_between(thresholds, lows, highs, color=color, alpha=0.15, linewidth=0)
    axes.set(xlabel="score", ylabel="share of episodes above", ylim=(0, 1.02))
    figure.legend(fontsize=8, loc="outside right upper")
    return figure
