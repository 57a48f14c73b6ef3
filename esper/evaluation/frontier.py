"""Score against cost over several budgets: a table, pictures, and frontier.json."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from esper.evaluation.arms import get_arm
from esper.evaluation.document import (
    DPI,
    Block,
    Paragraph,
    ReportFigure,
    ReportTable,
    Section,
    format_interval,
    write_report,
)
from esper.evaluation.plots import arm_style
from esper.evaluation.results import TaskResults, base_arm
from esper.evaluation.statistics import Estimate
from esper.files import write_buffered, write_file

FRONTIER_FILE = "frontier.json"
PICTURES = {  # file -> metric of the horizontal axis, its label
    "frontier": ("GFLOPs", "GFLOPs of an episode (arms of a budget are side by side)"),
    "frontier_seconds": ("seconds", "seconds of an episode"),
    "frontier_parameters": ("parameters", "parameters at the end"),
}
NOTE = (
    "Scores with 95 % intervals, as in the report of each budget, which is in the directory budget_N beside this one. "
    "Every episode spends its whole budget: training, validation, probes and the controller's own passes."
)
FRONTIER_METRICS = ("score", *(metric for metric, _ in PICTURES.values()))
SPREAD = 0.16  # width in which the arms of a budget are side by side, relative to the distance of two budgets
Costs = dict[str, dict[float, dict[str, Estimate]]]  # arm -> budget -> metric


def frontier_costs(tasks: Mapping[float, TaskResults]) -> Costs:
    """The metrics of each arm with each budget; the best arm of the largest budget first."""
    costs: Costs = {}
    for budget, task in tasks.items():
        for arm, results in task.arms.items():
            estimates = {metric: results.estimate_of(metric) for metric in FRONTIER_METRICS}
            known = {metric: estimate for metric, estimate in estimates.items() if estimate is not None}
            if "score" in known:
                costs.setdefault(arm, {})[budget] = known
    return dict(sorted(costs.items(), key=lambda item: -item[1][max(item[1])]["score"].value))


def frontier_table(costs: Costs, budgets: Sequence[float]) -> ReportTable:
    """One row for each arm: its score with each budget."""
    rows = [
        [arm, *(format_interval(own[budget]["score"]) if budget in own else "-" for budget in budgets)]
        for arm, own in costs.items()
    ]
    return ReportTable(("arm", *(f"{budget:g} GFLOPs" for budget in budgets)), rows)


def plot_costs(costs: Costs, metric: str, label: str, title: str) -> Figure:
    """Score against one kind of cost: a line for each arm, with intervals."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes: Axes = figure.subplots()
    factors = _side_by_side(costs) if metric == "GFLOPs" else dict.fromkeys(costs, 1.0)
    for arm, own in costs.items():
        points = [(each[metric], each["score"]) for _, each in sorted(own.items()) if metric in each]
        if not points:
            continue
        x = np.array([cost.value for cost, _ in points]) * factors[arm]
        y = np.array([score.value for _, score in points])
        errors = np.array([[score.value - score.low, score.high - score.value] for _, score in points]).T
        line = "-" if get_arm(base_arm(arm)).grows else "--"
        style = {
            **arm_style(arm),
            "linestyle": line,
            "linewidth": 2.2 if arm == "ppo" else 1.0,
            "elinewidth": 0.9,
            "capsize": 2,
        }
        axes.errorbar(x, y, yerr=errors, label=f"{arm}  {y[-1]:.1f}", alpha=0.9, **style)
    axes.set(xlabel=label, ylabel="score", xscale="log", title=f"{title} (dashed: networks that do not grow)")
    axes.set_ylim(*_score_range(costs))
    budgets = sorted({budget for own in costs.values() for budget in own})
    axes.xaxis.set_major_locator(FixedLocator(budgets) if metric == "GFLOPs" else LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator() if metric == "GFLOPs" else LogLocator(subs="all"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.2)
    handles, labels = axes.get_legend_handles_labels()
    legend = figure.legend(handles, labels, fontsize=8, loc="outside right upper", title="score at the last budget")
    legend.get_title().set_fontsize(8)
    return figure


def _score_range(costs: Costs) -> tuple[float, float]:
    """The range of all scores with a margin; wide intervals of few episodes may exceed it."""
    scores = [each["score"].value for own in costs.values() for each in own.values()]
    margin = 0.15 * (max(scores) - min(scores)) + 0.5
    return min(scores) - margin, max(scores) + margin


def _side_by_side(costs: Costs) -> dict[str, float]:
    """Factors that put the arms of a budget next to each other: they all cost the same."""
    budgets = sorted({budget for own in costs.values() for budget in own})
    distance = float(np.log(budgets[-1] / budgets[0])) / (len(budgets) - 1) if len(budgets) > 1 else 1.0
    positions = np.linspace(-SPREAD, SPREAD, len(costs)) * distance if len(costs) > 1 else np.zeros(1)
    return dict(zip(costs, np.exp(positions).tolist(), strict=True))


def write_frontier(tasks: Mapping[str, Mapping[float, TaskResults]], directory: Path) -> list[Path]:
    """Write frontier.json, the pictures of each task, and a report with both; returns the files."""
    sections, content, files = [], {}, []
    for number, (title, by_budget) in enumerate(tasks.items()):
        costs = frontier_costs(by_budget)
        content[title] = _to_plain(costs)
        blocks: list[Block] = [frontier_table(costs, sorted(by_budget)), Paragraph(NOTE)]
        for name, (metric, label) in PICTURES.items():
            own_name = name if not number else name.replace("frontier", f"frontier{number}")
            figure = plot_costs(costs, metric, label, title)
            path = directory / f"{own_name}.png"
            write_buffered(path, partial(figure.savefig, format="png", dpi=DPI))
            blocks.append(ReportFigure(own_name, figure, f"Score against {label}."))
            files.append(path)
        sections.append(Section(title, blocks))
    write_file(directory / FRONTIER_FILE, json.dumps(content, indent=2))
    return [*files, directory / FRONTIER_FILE, *write_report(directory, "esper: score against cost", sections)]


def _to_plain(costs: Costs) -> dict[str, dict[str, Any]]:
    return {
        arm: {f"{budget:g}": {metric: estimate.to_dict() for metric, estimate in known.items()}
              for budget, known in own.items()}
        for arm, own in costs.items()
    }  # fmt: skip
