"""What finished episodes say, section by section."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from esper.evaluation.arms import get_arm
from esper.evaluation.break_even import break_even
from esper.evaluation.controls import controls
from esper.evaluation.costs import cost_tables, growth_tables
from esper.evaluation.document import Block, CodeBlock, Paragraph, ReportFigure, ReportTable, Section, interval
from esper.evaluation.per_controller import per_controller_tables
from esper.evaluation.plots import frontier, profiles
from esper.evaluation.results import FIGURES, ArmResults, TaskResults, paired_values
from esper.evaluation.run_groups import repeated_runs
from esper.evaluation.statistics import DRAWS, MIN_UNITS, Estimate, difference, probability_of_improvement
from esper.evaluation.training_runs import TrainingRun, training_blocks
from esper.records import HELD_OUT
from esper.telemetry import timeline

COLUMNS = 4  # episodes side by side in a picture
FACTOR = "{:.2f}x"
UNDECIDED, TOO_FEW = "no difference can be told", "too few seeds"
FEW = (
    f"With fewer than {MIN_UNITS} seeds, intervals are hardly more than the range of what was seen; nothing is claimed."
)


@dataclass(frozen=True)
class Provenance:
    """How episodes came about, as their directories tell."""

    commands: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    checkpoints: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    remarks: Sequence[str] = ()  # what could not be read, or is not as usual
    reference: str | None = None  # the arm that the others are compared with; None picks one
    search_gflops: float | None = None  # GFLOPs that the search for a timetable took, for each host


def report_sections(
    tasks: Sequence[TaskResults], provenance: Provenance, runs: Sequence[TrainingRun] = ()
) -> tuple[str, list[Section]]:
    """The title and all sections: what episodes came to, and how the runs that trained controllers went."""
    chosen = {task.title: pick_reference(task, provenance.reference) for task in tasks}
    title = "esper: " + "; ".join(dict.fromkeys([*(task.name for task in tasks), *(run.task for run in runs)]))
    sections = [Section("The question", _question(tasks, chosen))] if tasks else []
    if provenance.remarks:
        sections.append(Section("Remarks", [Paragraph(remark) for remark in provenance.remarks]))
    for number, task in enumerate(tasks):
        with_name = "" if len(tasks) == 1 else f"{task.title}: "
        main = chosen[task.title]
        parts: dict[str, list[Block]] = {
            "results": _results(task),
            "paired differences": [*_differences(task, main), *per_controller_tables(task, main)],
            "cost against score": [
                ReportFigure(
                    f"frontier{number}",
                    frontier(task.arms),
                    "Interquartile means, 95 % intervals on both axes: score against parameters, and against FLOPs.",
                )
            ],
            "performance profile": [
                ReportFigure(
                    f"profile{number}",
                    profiles(task.arms, main),
                    f"Share of episodes that score above each value; the 95 % band of {main}.",
                )
            ],
            "median episodes": _timelines(task, number, main),
            "what was grown": growth_tables(task),
            "negative controls": controls(task),
            "accounting": [
                *cost_tables(task, provenance.checkpoints),
                *break_even(task, main, provenance.checkpoints, provenance.search_gflops),
            ],
        }
        sections += [Section(f"{with_name}{name.capitalize()}", blocks) for name, blocks in parts.items() if blocks]
    if len(tasks) > 1:
        sections.append(Section("All tasks together", _together(tasks, chosen)))
    if runs:
        sections.append(Section("Training", [*training_blocks(runs), *repeated_runs(runs)]))
    return title, [*sections, Section("Protocol", _protocol(tasks, provenance))]


def pick_reference(task: TaskResults, wanted: str | None) -> str:
    """The arm that others are compared with: the one that is wanted, else the learned one, else the first there is."""
    return next((name for name in (wanted, "ppo", "schedule") if name in task.arms), next(iter(task.arms)))


def verdict(gap: Estimate, seeds: int) -> str:
    """A win is claimed only where the interval excludes zero, on enough seeds."""
    if seeds < MIN_UNITS:
        return TOO_FEW
    if not gap.excludes_zero:
        return UNDECIDED
    return "better" if gap.value > 0 else "worse"


def _question(tasks: Sequence[TaskResults], chosen: Mapping[str, str]) -> list[Block]:
    blocks: list[Block] = [
        Paragraph(
            "Does growth as one controller decides it beat other ways to spend the same steps of training, per "
            "parameter and per FLOP? All arms see the same episode seeds: the same initial weights, data order and "
            "augmentation; only the decision about growth differs."
        )
    ]
    for task in tasks:
        main = chosen[task.title]
        told: dict[str, list[str]] = {}
        for name, other in task.arms.items():
            ours, theirs = paired_values([task.arms[main]], [other])
            if name != main and ours:
                told.setdefault(verdict(difference(ours, theirs), ours[0].shape[-1]), []).append(name)
        words = {
            "better": "scores above",
            "worse": "scores below",
            UNDECIDED: "cannot be told from",
            TOO_FEW: f"has been played on too few seeds (fewer than {MIN_UNITS}) to be told from",
        }
        found = "; ".join(f"{words[kind]} {', '.join(told[kind])}" for kind in words if kind in told)
        lines = task.arms[main].lines.values()
        growth = np.mean([line.parameters / line.host_parameters for line in lines])
        size = f"with {growth:.2f} times the host's parameters at the end"
        blocks.append(Paragraph(f"**{task.title}: {main}, {size}, {found or 'stands alone'}.**"))
    return blocks


def _results(task: TaskResults) -> list[Block]:
    rows = []
    for name, results in sorted(task.arms.items(), key=lambda item: -(_value(item[1], "score"))):
        cells = [interval(results.figure(title), form) for title, (_, form, _) in FIGURES.items()]
        rows.append([name, results.played, *cells])
    what = "-100 x bits per byte" if task.text else "accuracy in points"
    note = (
        f"Score = {what} on the {task.split} split - ln(parameters / host parameters), of the host with its "
        "fossilised seeds. Interquartile means (of fewer than four, means) with 95 % bootstrap intervals. Episodes are "
        "controllers x seeds; "
        "GFLOPs hold training, validation, probes and the controller's own passes; seconds are those of an episode's "
        "own thread, which shares the machine with others."
    )
    few = min(len(results.episode_seeds) for results in task.arms.values()) < MIN_UNITS
    return [ReportTable(("arm", "episodes", *FIGURES), rows), Paragraph(note), *([Paragraph(FEW)] if few else [])]


def _value(results: ArmResults, title: str) -> float:
    figure = results.figure(title)
    return float("-inf") if figure is None else figure.value


def _differences(task: TaskResults, main: str) -> list[Block]:
    ours, rows = task.arms[main], []
    for name, other in task.arms.items():
        mine, theirs = paired_values([ours], [other])
        if name == main or not mine:
            continue
        gap = difference(mine, theirs)
        factors = [FACTOR.format(_value(ours, title) / _value(other, title)) for title in ("parameters", "GFLOPs")]
        chance = probability_of_improvement(mine, theirs)
        seeds = mine[0].shape[-1]
        told = [interval(gap, "{:+.2f}"), interval(chance, "{:.2f}"), *factors, verdict(gap, seeds)]
        rows.append([f"{main} - {name}", str(seeds), *told])
    if not rows:
        return []
    header = ("comparison", "seeds", "score difference", "P(improvement)", "parameters", "FLOPs", f"{main} is")
    words = (
        "Differences are taken on the same seed; interquartile mean with a 95 % interval. P(improvement) is the "
        "probability that an episode scores above one of the other arm, whatever the seeds (Mann-Whitney). Parameters "
        f"and FLOPs are factors: what {main} has over what the other has."
    )
    unit = "" if ours.checkpoints == [None] else f" {_unit(len(ours.checkpoints))}"
    return [ReportTable(header, rows), Paragraph(words + unit)]


def _unit(count: int) -> str:
    """What the intervals speak of."""
    if count == 1:
        return "Intervals draw seeds anew; they say nothing of controllers that were trained another time."
    drawn = (
        f"The unit is the trained controller, of which there are {count}: intervals draw controllers and seeds anew."
    )
    if count >= MIN_UNITS:
        return drawn
    return (
        f"{drawn} So few of them are too few to speak of controllers to come: what is claimed is claimed of these. "
        f"Their intervals are nearly the range of all {DRAWS:,} draws, and the ends depend on them."
    )


def _timelines(task: TaskResults, number: int, main: str) -> list[Block]:
    ordered = sorted(task.arms.items(), key=lambda item: item[0] != main)
    titled = {
        f"{name}: {line.score:.1f}, {line.parameters:,.0f} parameters": line
        for name, line in ((name, results.median()) for name, results in ordered)
    }
    names, blocks = list(titled), []
    for start in range(0, len(names), COLUMNS):
        some = {name: titled[name] for name in names[start : start + COLUMNS]}
        caption = (
            "The median episode of each arm: validation score, and slots x steps coloured by stage, alpha as a line."
        )
        blocks.append(ReportFigure(f"timeline{number}_{start // COLUMNS}", timeline(some), caption))
    return list(blocks)


def _together(tasks: Sequence[TaskResults], chosen: Mapping[str, str]) -> list[Block]:
    """Differences over all tasks that have both arms and are scored alike."""
    if len({task.text for task in tasks}) > 1 or len({task.split for task in tasks}) > 1:
        return [Paragraph("The tasks are not scored alike, so that their scores are not put together.")]
    rows = []
    main = chosen[tasks[0].title]
    for name in dict.fromkeys(name for task in tasks for name in task.arms):
        having = [task for task in tasks if name in task.arms and main in task.arms]
        mine, theirs = paired_values([task.arms[main] for task in having], [task.arms[name] for task in having])
        if name != main and len(mine) > 1:
            gap = difference(mine, theirs)
            chance = probability_of_improvement(mine, theirs)
            seeds = sum(scores.shape[-1] for scores in mine)
            cells = (interval(gap, "{:+.2f}"), interval(chance, "{:.2f}"), verdict(gap, seeds))
            rows.append([f"{main} - {name}", str(len(mine)), str(seeds), *cells])
    if not rows:
        return [Paragraph("No two arms were played in more than one task.")]
    header = ("comparison", "tasks", "seeds", "score difference", "P(improvement)", f"{main} is")
    return [
        ReportTable(header, rows),
        Paragraph(
            "The mean over tasks of each task's interquartile mean; every draw has as many episodes of each task as "
            "were played."
        ),
    ]


def _protocol(tasks: Sequence[TaskResults], provenance: Provenance) -> list[Block]:
    blocks: list[Block] = []
    for task in tasks:
        environment, data = (task.config.get(group, {}) for group in ("environment", "data"))
        seeds = sorted({seed for results in task.arms.values() for seed in results.episode_seeds})
        blocks.append(
            Paragraph(
                f"**{task.title}**: episode seeds: {len(seeds)}; {environment.get('steps')} steps of "
                f"{environment.get('batches')} batches of {environment.get('batch')}; data "
                f"{_told(data)}; optimizer {_told(task.config.get('optimizer', {}))}."
            )
        )
    if tasks:
        words = (
            "Controllers learn on other seeds than these. The test split, where it is used, is read once per episode, "
            "at its end; rewards, controllers and every choice see the validation split alone. Intervals are "
            f"percentile bootstraps of {DRAWS:,} draws from a fixed seed, widened for few units (Hesterberg, 2015), "
            "and not adjusted for the number of comparisons. "
            f"A win is claimed where the interval of the paired difference excludes zero, on {MIN_UNITS} seeds or more."
        )
        names = dict.fromkeys(name for task in tasks for name in task.arms)
        meanings = [[name, _meaning(name)] for name in names]
        blocks += [Paragraph(words), ReportTable(("arm", "what it is"), meanings)]
    if provenance.commands:
        blocks += [Paragraph("Commands:"), CodeBlock(provenance.commands)]
    if provenance.versions:
        blocks.append(
            ReportTable(("with", "version"), [[name, version] for name, version in provenance.versions.items()])
        )
    return blocks


def _meaning(name: str) -> str:
    """Of an arm; the held-out episodes of training runs are arms of their own."""
    kind = next((kind for kind in HELD_OUT if name.endswith(f", {kind}")), None)
    return get_arm(name.partition(" (")[0]).meaning if kind is None else f"held-out episodes of training runs, {kind}"


def _told(settings: Mapping[str, Any]) -> str:
    """A part of a configuration in words."""
    parts = [f"{key}=({_told(value)})" if isinstance(value, Mapping) else f"{key}={value}"
             for key, value in settings.items() if not key.startswith("_")]  # fmt: skip
    return ", ".join([*([str(settings["_target_"]).split(".")[-1]] if "_target_" in settings else []), *parts])
