"""The sections of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from esper.evaluation.arms import get_arm
from esper.evaluation.break_even import break_even_blocks
from esper.evaluation.claims import (
    FEW_SEEDS_NOTE,
    NO_DIFFERENCE,
    TOO_FEW,
    ArmComparison,
    compare_arms,
    describe_scope,
    format_p_value,
)
from esper.evaluation.controls import control_blocks
from esper.evaluation.costs import cost_tables, growth_tables
from esper.evaluation.document import Block, CodeBlock, Paragraph, ReportFigure, ReportTable, Section, format_interval
from esper.evaluation.per_controller import per_controller_tables
from esper.evaluation.plots import plot_frontier, plot_profiles
from esper.evaluation.provenance import Provenance, describe_length
from esper.evaluation.regret import search_blocks
from esper.evaluation.rent_sweep import rent_blocks
from esper.evaluation.results import BARE_HOST, FAILURE_MARGIN, RESULT_METRICS, ArmResults, TaskResults, base_arm
from esper.evaluation.run_groups import run_group_tables
from esper.evaluation.statistics import MIN_UNITS, RESAMPLES, SIGNIFICANCE, probability_of_improvement
from esper.evaluation.task_sections import task_group_sections
from esper.evaluation.training_runs import TrainingRun, training_blocks
from esper.records import HELD_OUT
from esper.telemetry import timeline

TIMELINES_PER_FIGURE = 4


def report_sections(
    tasks: Sequence[TaskResults], provenance: Provenance, runs: Sequence[TrainingRun] = ()
) -> tuple[str, list[Section]]:
    """The title and all sections: the results of each task, the training runs, and the protocol."""
    references = {task.title: pick_reference(task, provenance.reference) for task in tasks}
    title = "esper: " + "; ".join(dict.fromkeys([*(task.name for task in tasks), *(run.task for run in runs)]))
    sections = [Section("The question", _question(tasks, references, provenance.primary))] if tasks else []
    if provenance.remarks:
        sections.append(Section("Remarks", [Paragraph(remark) for remark in provenance.remarks]))
    if tasks:
        sections += task_group_sections(tasks, references[tasks[0].title], provenance)
    for number, task in enumerate(tasks):
        prefix = "" if len(tasks) == 1 else f"{task.title}: "
        blocks = _task_blocks(task, number, references[task.title], provenance)
        sections += [Section(f"{prefix}{name}", parts) for name, parts in blocks.items() if parts]
    if runs:
        sections.append(Section("Training", [*training_blocks(runs), *run_group_tables(runs)]))
    return title, [*sections, Section("Protocol", _protocol(tasks, provenance))]


def _task_blocks(task: TaskResults, number: int, main: str, provenance: Provenance) -> dict[str, list[Block]]:
    """The sections of one task by title; `number` is part of its plots' file names."""
    frontier = ReportFigure(
        f"frontier{number}",
        plot_frontier(task.arms),
        "Interquartile means with 95 % intervals on both axes: score against parameters, and against FLOPs.",
    )
    profile = ReportFigure(
        f"profile{number}",
        plot_profiles(task.arms, main),
        f"Share of episodes that score above each value; the 95 % band of {main}.",
    )
    return {
        "Results": _results(task),
        "Paired differences": [*_differences(task, main, provenance.primary), *per_controller_tables(task, main)],
        "Rent": rent_blocks([task], main),
        "Cost against score": [frontier],
        "Performance profile": [profile],
        "Median episodes": _timelines(task, number, main),
        "What was grown": growth_tables(task),
        "Searches and regret": search_blocks(task, provenance),
        "Negative controls": control_blocks(task),
        "Accounting": [
            *cost_tables(task, provenance.checkpoints),
            *break_even_blocks(task, main, provenance.checkpoints, provenance.search_gflops),
        ],
    }


def pick_reference(task: TaskResults, wanted: str | None) -> str:
    """The arm that others are compared with: the wanted one, else ppo, else schedule, else the first of the task."""
    return next((name for name in (wanted, "ppo", "schedule") if name in task.arms), next(iter(task.arms)))


def _question(tasks: Sequence[TaskResults], references: Mapping[str, str], primary: str | None) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(
            "Does the growth that one controller decides on beat other uses of the same training, per parameter "
            "and per FLOP? All arms run on the same episode seeds: the same initial weights, data order and "
            "augmentation; only the decisions about growth differ."
        )
    ]
    phrases = {
        "better": "scores above",
        "worse": "scores below",
        NO_DIFFERENCE: "shows no significant difference from",
        TOO_FEW: f"has too few episode seeds (fewer than {MIN_UNITS}) for a comparison with",
    }
    for task in tasks:
        main = references[task.title]
        comparisons = compare_arms([task], main, primary)
        answer = "; ".join(
            f"{phrase} {', '.join(names)}"
            for kind, phrase in phrases.items()
            if (names := [comparison.arm for comparison in comparisons if comparison.outcome == kind])
        )
        counts = [one.controllers for one in comparisons if one.is_claim and one.controllers is not None]
        scope = describe_scope(min(counts, default=None))
        limit = f": a result {scope}, not of training runs in general" if scope else ""
        growth = np.mean([episode.growth for episode in task.arms[main].episodes])
        size = f"with {growth:.2f} times the host's parameters at the end"
        answer = f"{answer or 'has no arm to be compared with'}{limit}"
        blocks.append(Paragraph(f"**{task.title}: {main}, {size}, {answer}.**"))
    return blocks


def _results(task: TaskResults) -> list[Block]:
    rows = []
    for name, results in sorted(task.arms.items(), key=lambda item: -(_value_of(item[1], "score"))):
        cells = {title: format_interval(results.estimate_of(title), form)
                 for title, (_, form, _) in RESULT_METRICS.items()}  # fmt: skip
        summary = task.summarise(name)
        rows.append([
            name, results.count_text, cells.pop("score"), format_interval(summary.mean), f"{summary.worst_tenth:.2f}",
            f"{summary.failure_rate:.0%}", *cells.values(),
        ])  # fmt: skip
    score = "-100 x bits per byte" if task.is_text else "accuracy in points"
    weight = "" if task.rent == 1 else f"{task.rent:g} x "
    rent = f" - {weight}ln(parameters / host parameters)" if task.rent else ""
    note = (
        f"Score = {score} on the {task.split} split{rent}, of the host with its fossilised seeds. Interquartile means "
        "(of fewer than four values, means) with 95 % intervals; the second column of scores has the mean. The worst "
        "tenth is the mean of the lowest tenth of episodes, of one at least. An episode is a failure if it ended with "
        f"non-finite values, or scores more than {FAILURE_MARGIN:g} points below {BARE_HOST} on the same episode seed. "
        "Episodes are controllers x episode seeds. GFLOPs include training, validation, probes and the controller's "
        "own passes. Seconds are measured in an episode's own thread, which shares the machine with others."
    )
    is_few = min(len(results.episode_seeds) for results in task.arms.values()) < MIN_UNITS
    others = [title for title in RESULT_METRICS if title != "score"]
    table = ReportTable(("arm", "episodes", "score", "mean", "worst tenth", "failures", *others), rows)
    return [table, Paragraph(note), *([Paragraph(FEW_SEEDS_NOTE)] if is_few else [])]


def _value_of(results: ArmResults, title: str) -> float:
    estimate = results.estimate_of(title)
    return float("-inf") if estimate is None else estimate.value


def _differences(task: TaskResults, main: str, primary: str | None) -> list[Block]:
    ours, rows = task.arms[main], []
    for one in compare_arms([task], main, primary):
        other = task.arms[one.arm]
        factors = [f"{_value_of(ours, title) / _value_of(other, title):.2f}x" for title in ("parameters", "GFLOPs")]
        cells = [str(one.episode_seeds), *_difference_cells(one), *factors, one.claim]
        rows.append([f"{main} - {one.arm}{' (primary)' if one.is_primary else ''}", *cells])
    if not rows:
        return []
    header = (
        "comparison",
        "episode seeds",
        "score difference",
        "p, adjusted",
        "P(improvement)",
        "parameters",
        "FLOPs",
        f"result for {main}",
    )
    note = (
        "Differences are taken on the same episode seed: the interquartile mean of each controller, the mean over "
        "controllers, and a 95 % interval. p-values are adjusted for the number of comparisons (Holm), except that of "
        "the primary one; intervals are not. P(improvement) is the probability that an episode scores above one of "
        "the other arm on any episode seed (Mann-Whitney). "
        f"Parameters and FLOPs are factors: {main} divided by the other arm."
    )
    unit = "" if ours.checkpoints == [None] else f" {_describe_unit(len(ours.checkpoints))}"
    return [ReportTable(header, rows), Paragraph(note + unit)]


def _difference_cells(one: ArmComparison) -> list[str]:
    probability = probability_of_improvement(*one.strata)
    return [format_interval(one.gap, "{:+.2f}"), format_p_value(one.p_value), format_interval(probability)]


def _describe_unit(controllers: int) -> str:
    """What intervals are valid for."""
    if controllers == 1:
        return (
            "Intervals are over episode seeds: results are of this controller, and not valid for controllers from "
            "other training runs."
        )
    unit = f"The unit is the trained controller, of which there are {controllers}: intervals are over controllers and "
    if controllers >= MIN_UNITS:
        return f"{unit}episode seeds."
    return (
        f"{unit}episode seeds. With fewer than {MIN_UNITS}, results are of these controllers; nothing is claimed about "
        "training runs in general."
    )


def _timelines(task: TaskResults, number: int, main: str) -> list[Block]:
    ordered = sorted(task.arms.items(), key=lambda item: item[0] != main)
    titled = {
        f"{name}: {episode.score:.1f}, {episode.parameters:,.0f} parameters": episode
        for name, episode in ((name, results.median_episode()) for name, results in ordered)
    }
    names, blocks = list(titled), []
    for start in range(0, len(names), TIMELINES_PER_FIGURE):
        some = {name: titled[name] for name in names[start : start + TIMELINES_PER_FIGURE]}
        caption = (
            "The median episode of each arm: validation score, and slots x steps coloured by stage, alpha as a line."
        )
        blocks.append(ReportFigure(f"timeline{number}_{start // TIMELINES_PER_FIGURE}", timeline(some), caption))
    return list(blocks)


def _protocol(tasks: Sequence[TaskResults], provenance: Provenance) -> list[Block]:
    blocks: list[Block] = []
    for task in tasks:
        environment, data = (task.config.get(group, {}) for group in ("environment", "data"))
        episode_seeds = {episode.episode_seed for episode in task.episodes}
        blocks.append(
            Paragraph(
                f"**{task.title}**: {len(episode_seeds)} episode seeds; {describe_length(environment)}; "
                f"data {_describe_settings(data)}; "
                f"optimizer {_describe_settings(task.config.get('optimizer', {}))}."
            )
        )
    if tasks:
        primary = provenance.primary
        exempt = f", except that with {primary}, which was fixed beforehand" if primary else ""
        note = (
            "Controllers are trained on other episode seeds. The test split, if it is used, is read once per episode, "
            "at its end; rewards, controllers and every choice use the validation split only. The unit is a controller "
            "on a task. Intervals are Student's, of the variances that controllers and tasks contribute (Banerjee, "
            f"1960); with fewer than {MIN_UNITS} tasks, of controllers and episode seeds, whose part is a bootstrap of "
            f"{RESAMPLES:,} resamples with a fixed random seed. A difference is claimed if its p-value is below "
            f"{SIGNIFICANCE}, on {MIN_UNITS} episode seeds or more; otherwise there is no significant difference. "
            f"p-values of all comparisons of a table are adjusted for their number (Holm, 1979){exempt}."
        )
        names = dict.fromkeys(name for task in tasks for name in task.arms)
        arms = [[name, _describe_arm(name)] for name in names]
        blocks += [Paragraph(note), ReportTable(("arm", "what it is"), arms)]
    if provenance.commands:
        blocks += [Paragraph("Commands:"), CodeBlock(provenance.commands)]
    if provenance.versions:
        blocks.append(
            ReportTable(("with", "version"), [[name, version] for name, version in provenance.versions.items()])
        )
    return blocks


def _describe_arm(name: str) -> str:
    """An arm of an evaluation, or the held-out episodes of training runs."""
    kind = next((kind for kind in HELD_OUT if name.endswith(f", {kind}")), None)
    return get_arm(base_arm(name)).description if kind is None else f"held-out episodes of training runs, {kind}"


def _describe_settings(settings: Mapping[str, Any]) -> str:
    """A part of a configuration as text."""
    parts = [f"{key}=({_describe_settings(value)})" if isinstance(value, Mapping) else f"{key}={value}"
             for key, value in settings.items() if not key.startswith("_")]  # fmt: skip
    return ", ".join([*([str(settings["_target_"]).split(".")[-1]] if "_target_" in settings else []), *parts])
