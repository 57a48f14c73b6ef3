"""One figure of a run: score, explained variance, KL, entropy and ops over rounds."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from esper.files import write_buffered
from esper.records import HELD_OUT


def draw_rounds(rounds: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Save the figure to `path`; `rounds` are lines of rounds.jsonl."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2)
    decisions = [line["decisions"] for line in rounds]
    _plot_metric(axes[0, 0], rounds, "episode/score", "training episodes")
    for kind in HELD_OUT:
        validated = [line for line in rounds if line.get(f"validation/{kind}_score") is not None]
        if validated:
            scores = [line[f"validation/{kind}_score"] for line in validated]
            axes[0, 0].plot([line["decisions"] for line in validated], scores, "o--", label=f"held out, {kind}")
    axes[0, 0].set(title="score: mean of a round's episodes")
    _plot_metric(axes[0, 1], rounds, "losses/explained_variance", "explained variance")
    axes[0, 1].axhline(0, color="grey", linewidth=0.5)
    axes[0, 1].set(title="critic: explained variance of the rest", ylim=(-1, 1.05))
    _plot_metric(axes[1, 0], rounds, "policy/kl", "KL at the end of the update")
    axes[1, 0].set(title="KL of each update, and entropy of each head")
    axes[1, 0].set_ylim(bottom=0)
    entropy = axes[1, 0].twinx()
    for name in sorted({name for line in rounds for name in line if name.startswith("policy/entropy_")}):
        if name != "policy/entropy_bonus":
            _plot_metric(entropy, rounds, name, name.removeprefix("policy/").replace("_", " of "), linestyle=":")
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
    write_buffered(path, partial(figure.savefig, format="png", dpi=110))


def _plot_metric(axes: Axes, rounds: Sequence[dict[str, Any]], name: str, label: str, **style: Any) -> None:
    measured = [line for line in rounds if line.get(name) is not None]
    axes.plot([line["decisions"] for line in measured], [line[name] for line in measured], label=label, **style)
