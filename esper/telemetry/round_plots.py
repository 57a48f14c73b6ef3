"""A run as a picture: how its score, its critic and its choices went over rounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from esper.records import HELD_OUT


def draw_rounds(rounds: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """`rounds` are lines of rounds.jsonl."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    decisions = [line["decisions"] for line in rounds]
    _curve(axes[0, 0], rounds, "episode/score", "training episodes")
    for kind in HELD_OUT:
        seen = [line for line in rounds if line.get(f"validation/{kind}_score") is not None]
        where = [line["decisions"] for line in seen]
        if seen:
            scores = [line[f"validation/{kind}_score"] for line in seen]
            axes[0, 0].plot(where, scores, "o--", label=f"held out, {kind}")
    axes[0, 0].set(title="score: mean of a round's episodes")
    _curve(axes[0, 1], rounds, "losses/explained_variance", "explained variance")
    axes[0, 1].axhline(0, color="grey", linewidth=0.5)
    axes[0, 1].set(title="critic: share of the returns' variance foretold", ylim=(-1, 1.05))
    _curve(axes[1, 0], rounds, "policy/kl", "KL at the end of the update")
    axes[1, 0].set(title="how far each update went, and how open choices are")
    axes[1, 0].set_ylim(bottom=0)
    entropy = axes[1, 0].twinx()
    for name in sorted({name for line in rounds for name in line if name.startswith("policy/entropy_")}):
        if name != "policy/entropy_bonus":
            _curve(entropy, rounds, name, name.removeprefix("policy/").replace("_", " of "), linestyle=":")
    entropy.set(ylim=(0, 1.05))
    entropy.legend(fontsize="x-small", loc="lower right")
    ops = [name for name in rounds[0] if name.startswith("policy/op_")] if rounds else []
    shares = [[line[name] for line in rounds] for name in ops]
    if ops:
        axes[1, 1].stackplot(decisions, shares, labels=[name.removeprefix("policy/op_") for name in ops])
    axes[1, 1].set(title="share of each op", ylim=(0, 1))
    for axis in axes.flat:
        axis.set_xlabel("decisions")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="x-small", loc="lower left" if axis is axes[1, 0] else "upper left")
    figure.savefig(path, dpi=110)


def _curve(axes: Axes, rounds: Sequence[dict[str, Any]], name: str, label: str, **style: Any) -> None:
    seen = [line for line in rounds if line.get(name) is not None]
    axes.plot([line["decisions"] for line in seen], [line[name] for line in seen], label=label, **style)
