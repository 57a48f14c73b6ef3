"""Training runs: tables and curves from their rounds.jsonl."""

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

SCORE_METRICS = ("episode/score", "episode/return")  # the first that a run has recorded
CRITIC, KL, ENTROPY = "losses/explained_variance", "policy/kl", "policy/entropy_"
HELD_OUT_MARKERS = dict(zip(HELD_OUT, "os", strict=True))
QUARTER = 4  # first and last parts of a run are quarters
LEGEND_NAME_LENGTH = 25  # letters of a run's name up to which the legend has several columns
RUN_COLORS = colormaps["tab10"].colors  # type: ignore[attr-defined]


@dataclass(frozen=True)
class TrainingRun:
    """A training run. Runs with equal `settings` differ in their `run_seed` only.

    Arguments:
        name: distinguishes it from the other runs of a report
        task: what it trains on
        rounds: its lines of rounds.jsonl
        settings: its overrides without the run seed
        run_seed: the value of its key `seed`, as it was typed
    """

    name: str
    task: str
    rounds: Sequence[Mapping[str, Any]]
    settings: str = ""
    run_seed: str = ""

    def curve_of(self, metric: str) -> tuple[list[int], list[float]]:
        """The rounds in which a metric was measured, and its values."""
        points = [(line["round"], line[metric]) for line in self.rounds if line.get(metric) is not None]
        return [number for number, _ in points], [value for _, value in points]

    def quarter_mean(self, metric: str, *, last: bool) -> float | None:
        """A metric's mean over the first or last quarter of all rounds; None if it was not measured there."""
        count = max(1, len(self.rounds) // QUARTER)
        lines = self.rounds[-count:] if last else self.rounds[:count]
        values = [line[metric] for line in lines if line.get(metric) is not None]
        return sum(values) / len(values) if values else None

    def held_out_curve(self, kind: str) -> tuple[list[int], list[float]]:
        """Rounds and values of the score of held-out episodes: greedy or sampled."""
        return self.curve_of(f"validation/{kind}_{self.score_metric.partition('/')[2]}")

    @property
    def score_metric(self) -> str:
        """The score, or the return if there is no score."""
        return next((name for name in SCORE_METRICS if self.curve_of(name)[1]), SCORE_METRICS[0])

    @property
    def entropy_metrics(self) -> list[str]:
        """The entropy of each head."""
        names = {name for line in self.rounds for name in line if name.startswith(ENTROPY)}
        return sorted(name for name in names if name != f"{ENTROPY}bonus")


def run_names(runs: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """A name for each run, given its directory and overrides: the overrides that not all have, else its directory."""
    common = set.intersection(*(set(overrides) for _, overrides in runs)) if runs else set()
    names = [", ".join(o for o in overrides if o not in common) for _, overrides in runs]
    return names if all(names) and len(set(names)) == len(names) else short_labels([directory for directory, _ in runs])


def common_name_parts(runs: Sequence[TrainingRun]) -> list[str]:
    """The parts that the names of all runs have in common."""
    parts = [run.name.split(", ") for run in runs]
    return [part for part in parts[0] if all(part in others for others in parts)]


def training_blocks(runs: Sequence[TrainingRun]) -> list[Block]:
    """A table of all runs, and a plot for each task."""
    if not runs:
        return []
    low, high = HEALTHY_KL
    note = (
        "begins, ends: mean score on validation (return, if there is no score) of training episodes in the first "
        "and last quarter of a run's rounds, while the policy explores; greedy, sampled: of its last episodes on "
        "held-out episode seeds. In the last quarter: the explained variance of the critic (a constant one has 0), the "
        "lowest entropy of a head (1 is uniform over the legal options, 0 a collapsed head), and fossils and rollbacks "
        f"(rolls) per episode. KL: the share of updates between {low} and {high}. Minutes: of training episodes and "
        "updates."
    )
    blocks: list[Block] = [training_table(runs), Paragraph(note)]
    for number, (task, metric) in enumerate(dict.fromkeys((run.task, run.score_metric) for run in runs)):
        own = [run for run in runs if (run.task, run.score_metric) == (task, metric)]
        score = metric.partition("/")[2]
        caption = f"{task}: {score} of each round's episodes, explained variance of the critic, KL of each update."
        blocks.append(ReportFigure(f"learning{number}", plot_learning_curves(own), caption))
    return blocks


def training_table(runs: Sequence[TrainingRun]) -> ReportTable:
    """One row for each run."""
    header = (
        "run", "rounds", "begins", "ends", *HELD_OUT, "critic", "KL", "entropy", "fossils", "rolls", "minutes",
    )  # fmt: skip
    return ReportTable(header, [_run_row(run) for run in runs])


def _run_row(run: TrainingRun) -> list[str]:
    def show(value: float | None, form: str = "{:.2f}") -> str:
        return "-" if value is None else form.format(value)

    low, high = HEALTHY_KL
    updates = run.curve_of(KL)[1]
    healthy_share = sum(low <= kl <= high for kl in updates) / len(updates) if updates else None
    entropies = [run.quarter_mean(metric, last=True) for metric in run.entropy_metrics]
    held_out = [run.held_out_curve(kind)[1] for kind in HELD_OUT]
    seconds = [value for part in ("environment", "policy", "update") for value in run.curve_of(f"time/{part}")[1]]
    return [
        run.name,
        str(len(run.rounds)),
        show(run.quarter_mean(run.score_metric, last=False)),
        show(run.quarter_mean(run.score_metric, last=True)),
        *(show(scores[-1] if scores else None) for scores in held_out),
        show(run.quarter_mean(CRITIC, last=True)),
        show(healthy_share),
        show(min((entropy for entropy in entropies if entropy is not None), default=None)),
        show(run.quarter_mean("seeds/fossilized", last=True)),
        show(run.quarter_mean("seeds/rollbacks", last=True)),
        show(sum(seconds) / 60 if seconds else None, "{:.1f}"),
    ]


def plot_learning_curves(runs: Sequence[TrainingRun]) -> Figure:
    """Score, critic and KL over rounds: a line for each run, and the mean of runs that differ in their seed only."""
    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    scores, critic, divergence = figure.subplots(1, 3, width_ratios=[2, 1, 1])
    groups = list(dict.fromkeys(run.settings for run in runs))
    for number, run in enumerate(runs):
        color = _run_color(number if len(groups) == 1 else groups.index(run.settings))
        for axes, name in ((scores, run.score_metric), (critic, CRITIC), (divergence, KL)):
            axes.plot(*run.curve_of(name), color=color, linewidth=1.0, alpha=0.8, label=run.name)
        for kind, marker in HELD_OUT_MARKERS.items():
            scores.plot(*run.held_out_curve(kind), color=color, marker=marker, linestyle="", markeredgecolor="black")
    for number, settings in enumerate(groups):
        color = "black" if len(groups) == 1 else _run_color(number)
        _plot_mean(scores, [run for run in runs if run.settings == settings], color)
    score = runs[0].score_metric.partition("/")[2]
    scores.set(title=f"{score} of a round's episodes (marks: held out; o greedy, s sampled)")
    critic.axhline(0, color="grey", linewidth=0.5)
    critic.set(title="explained variance", ylim=(-0.5, 1.02))
    divergence.axhspan(*HEALTHY_KL, color="green", alpha=0.08)
    divergence.set(title="KL at the end of the update")
    divergence.set_ylim(bottom=0)
    for axes in (scores, critic, divergence):
        axes.set_xlabel("rounds")
        axes.title.set_fontsize(9)
        axes.grid(alpha=0.2)
    if len(runs) <= len(RUN_COLORS):
        columns = 4 if max(len(run.name) for run in runs) <= LEGEND_NAME_LENGTH else 1
        figure.legend(*scores.get_legend_handles_labels(), fontsize=8, loc="outside lower left", ncols=columns)
    return figure


def _run_color(number: int) -> Any:
    return RUN_COLORS[number % len(RUN_COLORS)]


def _plot_mean(axes: Axes, runs: Sequence[TrainingRun], color: Any) -> None:
    """The mean over several runs, for the rounds that all of them have."""
    curves = [dict(zip(*run.curve_of(run.score_metric), strict=True)) for run in runs]
    shared = sorted(set.intersection(*(set(curve) for curve in curves))) if len(runs) > 1 else []
    if shared:
        means = [float(np.mean([curve[number] for curve in curves])) for number in shared]
        axes.plot(shared, means, color=color, linewidth=2.2, label=", ".join(["mean", *common_name_parts(runs)]))
