"""What happened in episodes, as a picture: slots x steps coloured by stage, with the score above."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from esper.lifecycle import Stage

matplotlib.use("Agg")
COLOURS = {
    Stage.DORMANT: "#f2f2f2",
    Stage.GERMINATED: "#ffe08a",
    Stage.TRAINING: "#f6b26b",
    Stage.BLENDING: "#8fc1e3",
    Stage.HOLDING: "#3d85c6",
    Stage.FOSSILIZED: "#38761d",
    Stage.PRUNED: "#cc4125",
}


def draw(episodes: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One column for each named episode."""
    count = len(episodes)
    figure = Figure(figsize=(max(5.0, 3.6 * count), 4.2), layout="constrained")
    panels = figure.subplots(2, count, squeeze=False, sharex=True, height_ratios=[2, 1])
    scores = [step["score"] for episode in episodes.values() for step in episode["steps"] if step["score"] is not None]
    for column, (name, episode) in enumerate(episodes.items()):
        curve, lanes = panels[0][column], panels[1][column]
        steps = episode["steps"]
        curve.plot([np.nan if step["score"] is None else step["score"] for step in steps], color="#222222", marker=".")
        curve.set_ylim(min(scores) - 1, max(scores) + 1)
        curve.set_title(
            f"{name}: test {episode['test_score']:.1f}, {episode['parameters']:,.0f} parameters", fontsize=9
        )
        lanes.imshow(_lanes(steps), aspect="auto", interpolation="nearest")
        lanes.set_yticks(range(len(episode["slots"])), episode["slots"], fontsize=8)
        lanes.set_xlabel("step")
        _label(lanes, steps)
        if column == 0:
            curve.set_ylabel("validation score")
    handles = [Patch(color=colour, label=stage.name.lower()) for stage, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)


def _lanes(steps: Sequence[Mapping[str, Any]]) -> np.ndarray:
    return np.array([[to_rgb(COLOURS[Stage[stage]]) for stage in step["stage"]] for step in steps]).transpose(1, 0, 2)


def _label(lanes: Any, steps: Sequence[Mapping[str, Any]]) -> None:
    """The blueprint's name where a seed germinates."""
    for index, step in enumerate(steps):
        for slot, (entered, blueprint) in enumerate(zip(step["entered"], step["blueprint"], strict=True)):
            if Stage.GERMINATED.name in entered and blueprint:
                lanes.text(index - 0.4, slot, blueprint, fontsize=6, va="center")
