"""The stages of slots over time as a picture; imported where one is drawn, because matplotlib takes a while."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from esper.lifecycle.stages import Stage

COLOURS = {
    Stage.DORMANT: "#f2f2f2",
    Stage.GERMINATED: "#ffe08a",
    Stage.TRAINING: "#f6b26b",
    Stage.BLENDING: "#8fc1e3",
    Stage.HOLDING: "#3d85c6",
    Stage.FOSSILIZED: "#38761d",
    Stage.PRUNED: "#cc4125",
}


def draw_lanes(
    axes: Axes,
    slots: Sequence[str],
    stages: Sequence[Sequence[str]],
    alphas: Sequence[Sequence[float]],
    labels: Mapping[tuple[int, int], str],
) -> None:
    """A lane for each slot: coloured by stage, with alpha as a line.

    Arguments:
        axes: to draw on
        slots: their names
        stages, alphas: of each step and slot
        labels: texts by step and slot, such as the blueprint where a seed germinates
    """
    colours = np.array([[to_rgb(COLOURS[Stage[stage]]) for stage in step] for step in stages]).transpose(1, 0, 2)
    axes.imshow(colours, aspect="auto", interpolation="nearest")
    for slot in range(len(slots)):
        lane = np.array([step[slot] for step in alphas])
        axes.plot(slot + 0.45 - 0.9 * lane, color="#222222", linewidth=0.8, drawstyle="steps-mid")
    axes.set_yticks(range(len(slots)), slots, fontsize=8)
    for (step, slot), text in labels.items():
        axes.text(step - 0.4, slot, text, fontsize=6, va="center", clip_on=True)


def stage_legend(figure: Figure) -> None:
    """A legend of the stages below a figure."""
    handles = [Patch(color=colour, label=stage.name.lower()) for stage, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7, frameon=False)
