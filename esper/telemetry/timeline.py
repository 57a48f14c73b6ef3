"""What happens in an episode, as a figure and as text."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from esper.lifecycle import Stage
from esper.lifecycle.lanes import draw_lanes, stage_legend
from esper.records import EpisodeRecord, StepEntry

VERBS = {
    Stage.GERMINATED: "germinates",
    Stage.TRAINING: "trains in isolation",
    Stage.BLENDING: "starts to blend in",
    Stage.HOLDING: "is fully blended in and held",
    Stage.FOSSILIZED: "is fossilised",
    Stage.PRUNED: "is pruned",
}


def contribution(steps: Sequence[StepEntry], index: int, slot: int) -> float | None:
    """The latest measured contribution of a slot's seed up to a step; None if it was never measured.

    A seed is measured until it is fossilised or pruned.
    """
    for step in reversed(steps[: index + 1]):
        gain: float | None = step.contribution[slot]
        if gain is not None:
            return gain
        if Stage.GERMINATED.name in step.entered[slot]:
            break
    return None


def timeline(episodes: Mapping[str, EpisodeRecord]) -> Figure:
    """A column for each episode, by title: its score, and slots x steps coloured by stage with alpha as a line."""
    count = len(episodes)
    figure = Figure(figsize=(max(5.0, 3.6 * count), 4.2), layout="constrained")
    panels = figure.subplots(2, count, squeeze=False, sharex=True, height_ratios=[2, 1])
    scores = [step.score for episode in episodes.values() for step in episode.steps if step.score is not None]
    for column, (title, episode) in enumerate(episodes.items()):
        curve, lanes = panels[0][column], panels[1][column]
        steps = episode.steps
        curve.plot([np.nan if step.score is None else step.score for step in steps], color="#222222", marker=".")
        curve.set_ylim(min(scores, default=0) - 1, max(scores, default=1) + 1)
        curve.set_title(title, fontsize=9)
        alphas = [[alpha or 0.0 for alpha in step.alpha] for step in steps]
        draw_lanes(lanes, episode.slots, [step.stage for step in steps], alphas, _blueprint_labels(steps))
        lanes.set_xlabel("step")
        if column == 0:
            curve.set_ylabel("validation score")
    stage_legend(figure)
    return figure


def describe_episode(episode: EpisodeRecord) -> str:
    """An episode as text, one line per event."""
    lines = []
    for index, step in enumerate(episode.steps):
        for slot, entered in enumerate(step.entered):
            name, blueprint = episode.slots[slot], step.blueprint[slot]
            for stage in (stage for stage in VERBS if stage.name in entered):
                gain = contribution(episode.steps, index, slot)
                has_gain = gain is not None and stage in (Stage.HOLDING, Stage.FOSSILIZED, Stage.PRUNED)
                suffix = f", contribution {gain:+.1f} points" if has_gain else ""
                lines.append(f"- step {index}: {blueprint or 'the seed'} in {name} {VERBS[stage]}{suffix}")
        if step.rollback is not None:
            lines.append(f"- step {index}: the governor rolls the host back ({step.rollback.lower()})")
    last = episode.steps[-1]
    score = "unknown" if last.score is None else f"{last.score:.2f}"
    size = last.parameters or 0
    lines.append(f"- end: score {score}, {size:,.0f} parameters ({episode.host_parameters:,} of the host)")
    return "\n".join(lines)


def _blueprint_labels(steps: Sequence[StepEntry]) -> dict[tuple[int, int], str]:
    """The blueprint's name where a seed germinates, by step and slot."""
    return {
        (index, slot): blueprint
        for index, step in enumerate(steps)
        for slot, (entered, blueprint) in enumerate(zip(step.entered, step.blueprint, strict=True))
        if Stage.GERMINATED.name in entered and blueprint
    }
