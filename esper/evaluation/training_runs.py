"""How controllers learned: curves and figures of training runs, from the rounds they have recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from esper.evaluation.document import Block, Paragraph, ReportFigure, ReportTable
from esper.evaluation.per_controller import short_labels
from esper.records import HELD_OUT
from esper.telemetry import HEALTHY_KL

SCORES = ("episode/score", "episode/return")  # the first that a run has is what it came to
CRITIC, KL, ENTROPY = "losses/explained_variance", "policy/kl", "policy/entropy_"
MARKERS = dict(zip(HELD_OUT, "os", strict=True))
SHARE = 4  # first and last parts of a run are quarters
BRIEF = 25  # letters of a name, for several in a row
PALETTE = colormaps["tab10"].colors  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TrainingRun:
    """A training run: what it is called beside others, what it trains on, how, and its lines of rounds.jsonl.

    Runs of the same `settings` differ in their `seed` alone.
    """

    name: str
    task: str
    rounds: Sequence[Mapping[str, Any]]
    settings: str = ""
    seed: str = ""

    def known(self, figure: str) -> tuple[list[int], list[float]]:
        """The rounds in which a figure was measured, and what it was."""
        seen = [(line["round"], line[figure]) for line in self.rounds if line.get(figure) is not None]
        return [number for number, _ in seen], [value for _, value in seen]

    def quarter(self, figure: str, *, last: bool) -> float | None:
        """A figure's mean over the first or last quarter of all rounds."""
        count = max(1, len(self.rounds) // SHARE)
        lines = self.rounds[-count:] if last else self.rounds[:count]
        values = [line[figure] for line in lines if line.get(figure) is not None]
        return sum(values) / len(values) if values else None

    @property
    def score(self) -> str:
        """The name of the figure that says how well it did."""
        return next((name for name in SCORES if self.known(name)[1]), SCORES[0])

    @property
    def heads(self) -> list[str]:
        names = {name for line in self.rounds for name in line if name.startswith(ENTROPY)}
        return sorted(name for name in names if name != f"{ENTROPY}bonus")


def run_names(runs: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """What each of some runs is called, given its directory and overrides: what sets it apart from the others."""
    common = set.intersection(*(set(overrides) for _, overrides in runs)) if runs else set()
    names = [", ".join(o for o in overrides if o not in common) for _, overrides in runs]
    return names if all(names) and len(set(names)) == len(names) else short_labels([directory for directory, _ in runs])


def common_parts(runs: Sequence[TrainingRun]) -> list[str]:
    """What the names of some runs have in common."""
    parts = [run.name.split(", ") for run in runs]
    return [part for part in parts[0] if all(part in others for others in parts)]


def training_blocks(runs: Sequence[TrainingRun]) -> list[Block]:
    """A table of all runs, and a picture for each task."""
    if not runs:
        return []
    low, high = HEALTHY_KL
    words = (
        "begins, ends: the mean score on validation (the return, where there is no score) of training episodes in the "
        "first and last quarter of a run's rounds, of a policy that explores; greedy, sampled: of its last episodes on "
        "seeds that it never learns on. In the last quarter: the share of the returns' variance that the critic "
        "foretold (healthy above 0.5), the least entropy of a head (1 is even chance over what is legal, 0 a head that "
        "has collapsed), and fossils and rollbacks (rolls) in an episode. KL: the share of updates between "
        f"{low} and {high}. Minutes: of playing training episodes and learning from them."
    )
    blocks: list[Block] = [table(runs), Paragraph(words)]
    for number, (task, score) in enumerate(dict.fromkeys((run.task, run.score) for run in runs)):
        some = [run for run in runs if (run.task, run.score) == (task, score)]
        what = score.partition("/")[2]
        caption = f"{task}: {what} of each round's episodes, explained variance of the critic, KL of each update."
        blocks.append(ReportFigure(f"learning{number}", curves(some), caption))
    return blocks


def table(runs: Sequence[TrainingRun]) -> ReportTable:
    header = (
        "run", "rounds", "begins", "ends", *HELD_OUT, "critic", "KL", "entropy", "fossils", "rolls", "minutes",
    )  # fmt: skip
    return ReportTable(header, [_row(run) for run in runs])


def _row(run: TrainingRun) -> list[str]:
    def told(value: float | None, form: str = "{:.2f}") -> str:
        return "-" if value is None else form.format(value)

    low, high = HEALTHY_KL
    steps = run.known(KL)[1]
    inside = sum(low <= step <= high for step in steps) / len(steps) if steps else None
    open_heads = [value for head in run.heads if (value := run.quarter(head, last=True)) is not None]
    held_out = [run.known(f"validation/{kind}_{run.score.partition('/')[2]}")[1] for kind in HELD_OUT]
    seconds = [second for part in ("environment", "policy", "update") for second in run.known(f"time/{part}")[1]]
    return [
        run.name,
        str(len(run.rounds)),
        told(run.quarter(run.score, last=False)),
        told(run.quarter(run.score, last=True)),
        *(told(scores[-1] if scores else None) for scores in held_out),
        told(run.quarter(CRITIC, last=True)),
        told(inside),
        told(min(open_heads, default=None)),
        told(run.quarter("seeds/fossilized", last=True)),
        told(run.quarter("seeds/rollbacks", last=True)),
        told(sum(seconds) / 60 if seconds else None, "{:.1f}"),
    ]


def curves(runs: Sequence[TrainingRun]) -> Figure:
    """Score, critic and KL over rounds: a line for each run, and the mean of those that differ in their seed alone."""
    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    scores, critic, divergence = figure.subplots(1, 3, width_ratios=[2, 1, 1])
    groups = list(dict.fromkeys(run.settings for run in runs))
    for number, run in enumerate(runs):
        shade = _shade(number if len(groups) == 1 else groups.index(run.settings))
        for axes, name in ((scores, run.score), (critic, CRITIC), (divergence, KL)):
            axes.plot(*run.known(name), color=shade, linewidth=1.0, alpha=0.8, label=run.name)
        for kind, marker in MARKERS.items():
            found = run.known(f"validation/{kind}_{run.score.partition('/')[2]}")
            scores.plot(*found, color=shade, marker=marker, linestyle="", markeredgecolor="black")
    for number, settings in enumerate(groups):
        shade = "black" if len(groups) == 1 else _shade(number)
        _mean(scores, [run for run in runs if run.settings == settings], shade)
    scores.set(title=f"{runs[0].score.partition('/')[2]} of a round's episodes (marks: held out; o greedy, s sampled)")
    critic.axhline(0, color="grey", linewidth=0.5)
    critic.set(title="explained variance", ylim=(-0.5, 1.02))
    divergence.axhspan(*HEALTHY_KL, color="green", alpha=0.08)
    divergence.set(title="KL at the end of the update")
    divergence.set_ylim(bottom=0)
    for axes in (scores, critic, divergence):
        axes.set_xlabel("rounds")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.2)
    if len(runs) <= len(PALETTE):
        columns = 4 if max(len(run.name) for run in runs) <= BRIEF else 1
        figure.legend(*scores.get_legend_handles_labels(), fontsize=8, loc="outside lower left", ncols=columns)
    return figure


def _shade(number: int) -> Any:
    return PALETTE[number % len(PALETTE)]


def _mean(axes: Axes, runs: Sequence[TrainingRun], shade: Any) -> None:
    """The mean over several runs of every round that all have played."""
    tables = [dict(zip(*run.known(run.score), strict=True)) for run in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables))) if len(runs) > 1 else []
    if shared:
        means = [float(np.mean([table[number] for table in tables])) for number in shared]
        axes.plot(shared, means, color=shade, linewidth=2.2, label=", ".join(["mean", *common_parts(runs)]))
