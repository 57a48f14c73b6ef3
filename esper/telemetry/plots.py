"""Figures of a run for loggers."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from esper.lifecycle import Stage, merge_slot_names
from esper.records import EpisodeRecord
from esper.telemetry.timeline import contribution


def as_array(figure: Figure) -> np.ndarray:
    """uint8 [height, width, 3]."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]


def ops_over_rounds(rounds: Sequence[float], shares: Mapping[str, Sequence[float]]) -> Figure:
    """Share of each op over rounds."""
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(rounds, list(shares.values()), labels=list(shares))
    axes.set(xlabel="round", ylabel="share of decisions", ylim=(0, 1))
    axes.legend(loc="upper right", fontsize="small")
    return figure


def contributions(episodes: Sequence[EpisodeRecord]) -> Figure:
    """Mean contribution of seeds when they were fossilised, by slot and blueprint, in points."""
    gains: dict[tuple[str, str], list[float]] = {}
    for episode in episodes:
        for when, step in enumerate(episode.steps):
            for index, entered in enumerate(step.entered):
                gain = contribution(episode.steps, when, index)
                if Stage.FOSSILIZED.name in entered and gain is not None:
                    gains.setdefault((str(step.blueprint[index]), episode.slots[index]), []).append(gain)
    slots = merge_slot_names(episode.slots for episode in episodes)
    blueprints = sorted({blueprint for blueprint, _ in gains}) or ["none"]
    table = np.full((len(blueprints), len(slots)), np.nan)
    figure = Figure(figsize=(6, 1.5 + 0.4 * len(blueprints)), layout="constrained")
    axes = figure.subplots()
    for (blueprint, slot), values in gains.items():
        table[blueprints.index(blueprint), slots.index(slot)] = float(np.mean(values))
    largest = max(1.0, float(np.nanmax(np.abs(table)))) if gains else 1.0
    bound = 1.6 * largest  # so that text is readable on every colour
    image = axes.imshow(table, cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto")
    for (blueprint, slot), values in gains.items():
        text = f"{np.mean(values):+.1f} ({len(values)})"
        axes.text(slots.index(slot), blueprints.index(blueprint), text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(slots)), slots)
    axes.set_yticks(range(len(blueprints)), blueprints)
    axes.set_title("mean contribution in points of seeds when fossilised (count)", fontsize=9)
    figure.colorbar(image)
    return figure


def frontier(parameters: Sequence[float], scores: Sequence[float]) -> Figure:
    """Score against parameters of all episodes so far, and their Pareto frontier as a line."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.scatter(parameters, scores, c=np.arange(len(scores)), cmap="viridis", s=14)
    best = pareto_frontier(parameters, scores)
    axes.plot([parameters[i] for i in best], [scores[i] for i in best], "o-", color="#cc4125", fillstyle="none")
    axes.set(xlabel="parameters at the end", ylabel="validation score", xscale="log")
    axes.set_title("all episodes, darker is earlier; the line is the Pareto frontier", fontsize=9)
    return figure


def pareto_frontier(parameters: Sequence[float], scores: Sequence[float]) -> list[int]:
    """Indices of the points that no other point beats in parameters and score, ordered by parameters."""
    order = sorted(range(len(scores)), key=lambda i: (parameters[i], -scores[i]))
    best, frontier_points = -np.inf, []
    for index in order:
        if scores[index] > best:
            best = scores[index]
            frontier_points.append(index)
    return frontier_points
