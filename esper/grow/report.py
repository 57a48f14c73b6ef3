"""What a growth shows: a table, a picture, figures for loggers and a line for each event."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from esper.grow.grower import Grower
from esper.lifecycle import Stage
from esper.lifecycle.lanes import draw_lanes, stage_legend

PICTURE = "growth.png"  # in the log directory
Record = Mapping[str, Any]


@dataclass
class SeedCourse:
    """What became of a seed."""

    slot: str
    blueprint: str
    planted: int  # step
    stage: str
    parameters: int
    contribution: float | None  # latest measurement, in points
    removed: int | None = None  # step


def seed_courses(history: Sequence[Record], summary: Sequence[Record]) -> list[SeedCourse]:
    """All seeds that ever grew, in the order in which they were planted.

    Arguments:
        history, summary: of a Grower
    """
    courses: list[SeedCourse] = []
    live: dict[str, SeedCourse] = {}
    for record in history:
        for slot in [slot for slot in live if slot not in record["seeds"]]:
            live.pop(slot).removed = record["step"]
        for slot, seed in record["seeds"].items():
            known = live.get(slot)
            if known is None or known.planted != seed["planted"]:
                known = SeedCourse(slot, seed["blueprint"], seed["planted"], "", seed["parameters"], None)
                courses.append(known)
                live[slot] = known
            known.stage = seed["stage"]
            known.contribution = record["contribution"].get(slot, known.contribution)
    kept = {seed["slot"]: seed for seed in summary}
    last = history[-1]["step"] if history else 0
    for course in courses:
        seed = kept.get(course.slot)
        if course.removed is None and seed is not None and seed["planted"] == course.planted:
            course.stage, course.contribution = seed["stage"], seed["contribution"]
        elif course.removed is None:
            course.removed = last
        if course.removed is not None:
            course.stage = Stage.PRUNED.name
    known_seeds = {(course.slot, course.planted) for course in courses}
    new = [seed for seed in summary if (seed["slot"], seed["planted"]) not in known_seeds]
    fields = ("slot", "blueprint", "planted", "stage", "parameters", "contribution")
    return courses + [SeedCourse(**{field: seed[field] for field in fields}) for seed in new]


def growth_table(courses: Sequence[SeedCourse], steps: int, parameters: tuple[int, int]) -> Table:
    """A row for each seed; `parameters` are those of the network before and now."""
    before, now = parameters
    caption = f"{now:,} parameters, {now / max(1, before):.2f} times those of the network without seeds"
    table = Table(title="What grew", caption=caption, title_justify="left")
    for name in ("slot", "blueprint", "planted", "stage", "parameters", "contribution"):
        table.add_column(name, justify="right" if name in ("parameters", "contribution") else "left")
    for course in courses:
        removed = "" if course.removed is None else f", removed {course.removed}"
        gain = "not measured" if course.contribution is None else f"{course.contribution:+.2f}"
        table.add_row(
            course.slot,
            course.blueprint,
            f"{course.planted} of {steps}{removed}",
            course.stage.lower(),
            f"{course.parameters:,}",
            gain,
        )
    return table


def growth_picture(history: Sequence[Record], slots: Sequence[str]) -> Figure:
    """The score over the steps, and below it slots x steps, coloured by stage with alpha as a line."""
    figure = Figure(figsize=(max(6.0, 0.12 * len(history)), 2.6 + 0.3 * len(slots)), layout="constrained")
    curve, lanes = figure.subplots(2, 1, sharex=True, height_ratios=[2, max(1.0, 0.4 * len(slots))])
    curve.plot([record["score"] for record in history], color="#222222", marker=".")
    curve.set_ylabel("validation score")
    stages = [[_seed(record, slot).get("stage", Stage.DORMANT.name) for slot in slots] for record in history]
    alphas = [[_seed(record, slot).get("alpha", 0.0) for slot in slots] for record in history]
    labels = {
        (index, column): seed["blueprint"]
        for index, record in enumerate(history)
        for column, slot in enumerate(slots)
        if (seed := _seed(record, slot)) and (index == 0 or not _is_same(_seed(history[index - 1], slot), seed))
    }
    draw_lanes(lanes, slots, stages, alphas, labels)
    lanes.set_xlabel("validation")
    stage_legend(figure)
    return figure


def growth_scalars(record: Record) -> dict[str, float]:
    """Figures of one step for loggers."""
    scalars = {
        "grow/parameters": float(record["parameters"]),
        "grow/seeds": float(len(record["seeds"])),
        "grow/flops": float(record["flops"]),
        "grow/progress": float(record["progress"]),
    }
    scalars |= {f"grow/alpha/{slot}": float(seed["alpha"]) for slot, seed in record["seeds"].items()}
    scalars |= {f"grow/contribution/{slot}": value for slot, value in record["contribution"].items()}
    return {name: value for name, value in scalars.items() if math.isfinite(value)}


def log_events(grower: Grower, known: int, when: str) -> None:
    """A line for each event of the last step, from the one after the known ones on."""
    for event in grower.history[-1]["events"][known:] if grower.history else ():
        rank_zero_info(f"esper: {event} {when}")


def log_scalars(trainer: Trainer, grower: Grower) -> None:
    """Send the figures of the last step to every logger."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(growth_scalars(grower.history[-1]), step=trainer.global_step)


def show_growth(trainer: Trainer, grower: Grower, parameters: int) -> None:
    """Print the table, and save the picture; `parameters` are those of the network without seeds."""
    directory = trainer.log_dir  # every process must ask for it
    if not trainer.is_global_zero or not grower.history:
        return
    summary = grower.summary()
    now = parameters + sum(seed["parameters"] for seed in summary)
    steps = grower.history[-1]["step"]
    courses = seed_courses(grower.history, summary)
    Console().print(growth_table(courses, steps, (parameters, now)) if courses else "esper: nothing grew")
    figure = growth_picture(grower.history, grower.table.names)
    if directory is not None:
        file = Path(directory) / PICTURE
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure("grow/timeline", figure, trainer.global_step)


def _seed(record: Record, slot: str) -> Mapping[str, Any]:
    seed: Mapping[str, Any] = record["seeds"].get(slot, {})
    return seed


def _is_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return bool(before) and before["planted"] == now["planted"]
