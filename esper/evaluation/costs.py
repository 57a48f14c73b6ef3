"""What arms cost, and what they grew."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from esper.evaluation.document import Block, Paragraph, ReportTable
from esper.evaluation.results import ArmResults, TaskResults
from esper.lifecycle import Op, Stage

PARTS = ("training", "isolated", "validation", "probes", "controller")
SIZES = {"final": "parameters", "peak": "parameters_peak", "mean": "parameters_mean"}


def cost_tables(task: TaskResults, checkpoints: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """FLOPs by what they went into, parameters over time, and what the controllers' own training cost."""
    rows = []
    for name, results in task.arms.items():
        lines = list(results.lines.values())
        spent = [_mean(line.flops_by_part.get(part) for line in lines) for part in PARTS]
        cells = [_gflops(flops) for flops in (*spent, _mean(line.flops for line in lines))]
        sizes = [_shown(_mean(getattr(line, key) for line in lines), "{:,.0f}") for key in SIZES.values()]
        rows.append([name, *cells, *sizes])
    header = ("arm", *PARTS, "all GFLOPs", *(f"{title} parameters" for title in SIZES))
    blocks: list[Block] = [
        ReportTable(header, rows),
        Paragraph(
            "Means over episodes, in GFLOPs. Training is forward and backward of the host and of seeds that are "
            "blended in; isolated is what seeds cost while they train behind the host; seeds that were pruned stay "
            "charged. Arms matched in FLOPs train for all that the reference spent, its validation and probes "
            "included. Peak and mean parameters are over the steps of an episode, undecided seeds included."
        ),
    ]
    if task.text:
        inside = _mean(line.embedding_parameters for line in task.lines())
        blocks.append(Paragraph(f"Of these parameters, {_shown(inside, '{:,.0f}')} are embeddings of the host."))
    rows = [
        [
            label,
            str(about.get("weights", "-")),
            str(about.get("acts", "-")),
            str(about.get("rounds", "-")),
            str(about.get("episodes", "-")),
            _shown(about.get("gflops"), "{:,.0f}"),
            _shown(about.get("seconds"), "{:,.0f}"),
            str(about.get("trained_on", "-")),
        ]
        for label, about in checkpoints.items()
        if any(label in results.checkpoints for results in task.arms.values())
    ]
    if rows:
        header = ("trained controller", "weights", "acts", "rounds", "episodes", "GFLOPs", "seconds", "trained on")
        blocks += [
            Paragraph("The controllers' own training, which no episode above is charged for:"),
            ReportTable(header, rows),
        ]
    return blocks


def growth_tables(task: TaskResults) -> list[Block]:
    """How often each op was taken, and what became of seeds, by blueprint and by slot."""
    by_blueprint = [row for name, results in task.arms.items() for row in _by_blueprint(name, results)]
    slots = task.lines()[0].slots
    taken = {step.action["op"] for line in task.lines() for step in line.steps}
    ops = [op for op in Op if op.name in taken]
    by_slot = []
    for name, results in task.arms.items():
        lines = list(results.lines.values())
        kept = [_mean(slot in line.fossils for line in lines) for slot in slots]
        first = [line.germinations[0].step for line in lines if line.germinations]
        by_slot.append([name, *(f"{share:.2f}" for share in kept), _shown(_mean(first), "{:.1f}")])
    by_op = []
    for name, results in task.arms.items():
        counts = Counter(step.action["op"] for line in results.lines.values() for step in line.steps)
        by_op.append([name, *(f"{counts[op.name] / len(results.lines):.2f}" for op in ops)])
    tables: list[Block] = [ReportTable(("arm", *(f"{op.name} an episode" for op in ops)), by_op)]
    if by_blueprint:
        tables.append(ReportTable(("arm", "blueprint", "germinated", "fossilised", "pruned"), by_blueprint))
    header = ("arm", *(f"fossil in {slot}" for slot in slots), "step of the first germination")
    tables.append(ReportTable(header, by_slot))
    return [*tables, Paragraph("Means over episodes; arms that begin with fossils germinate none.")]


def _by_blueprint(name: str, results: ArmResults) -> list[list[str]]:
    lines = list(results.lines.values())
    counts: dict[str, list[int]] = {}
    for line in lines:
        for step in line.steps:
            for blueprint, entered in zip(step.blueprint, step.entered, strict=True):
                if blueprint is not None:
                    found = counts.setdefault(blueprint, [0, 0, 0])
                    for index, stage in enumerate((Stage.GERMINATED, Stage.FOSSILIZED, Stage.PRUNED)):
                        found[index] += stage.name in entered
    ordered = sorted(counts.items(), key=lambda item: -item[1][0])
    return [[name, blueprint, *(f"{count / len(lines):.2f}" for count in found)] for blueprint, found in ordered]


def _mean(values: Iterable[float | None]) -> float | None:
    """None where any is not measured, or there are none."""
    found = list(values)
    return None if not found or None in found else float(np.mean([value for value in found if value is not None]))


def _gflops(flops: float | None) -> str:
    if flops is None or flops == 0 or flops >= 1e7:
        return _shown(None if flops is None else flops / 1e9, "{:,.2f}")
    return f"{flops / 1e9:.1g}"  # so that what is little does not look like nothing


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
