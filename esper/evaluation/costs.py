"""The costs of arms, and what they grew."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from esper.evaluation.document import Block, Paragraph, ReportTable
from esper.evaluation.results import ArmResults, TaskResults
from esper.lifecycle import ALL_SLOTS, Op, Stage, choice_name, merge_slot_names

FLOPS_PARTS = ("training", "isolated", "validation", "probes", "controller")
SIZE_FIELDS = {"final": "parameters", "peak": "parameters_peak", "mean": "parameters_mean"}


def cost_tables(task: TaskResults, checkpoints: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """FLOPs by part, parameters over the episode, and the cost of training the controllers."""
    rows = []
    for name, results in task.arms.items():
        episodes = results.episodes
        parts = [_mean(episode.flops_by_part.get(part) for episode in episodes) for part in FLOPS_PARTS]
        cells = [_format_gflops(flops) for flops in (*parts, _mean(episode.flops for episode in episodes))]
        sizes = [_mean(getattr(episode, field) for episode in episodes) for field in SIZE_FIELDS.values()]
        rows.append([name, *cells, *(_format(size, "{:,.0f}") for size in sizes)])
    header = ("arm", *FLOPS_PARTS, "all GFLOPs", *(f"{title} parameters" for title in SIZE_FIELDS))
    blocks: list[Block] = [
        ReportTable(header, rows),
        Paragraph(
            "Means over episodes, in GFLOPs. Training is forward and backward of the host and of seeds that are "
            "blended in; isolated is the cost of seeds while they train in isolation. The cost of a seed that is "
            "pruned still counts. Arms matched in FLOPs train for all that the reference spent, its validation and "
            "probes included. Peak and mean parameters are over the steps of an episode and include seeds that are "
            "not fossilised."
        ),
    ]
    if task.is_text:
        embeddings = _mean(episode.embedding_parameters for episode in task.episodes)
        blocks.append(Paragraph(f"Of these parameters, {_format(embeddings, '{:,.0f}')} are embeddings of the host."))
    return [*blocks, *_training_cost_table(task, checkpoints)]


def _training_cost_table(task: TaskResults, checkpoints: Mapping[str, Mapping[str, Any]]) -> list[Block]:
    """Empty without trained controllers."""
    rows = [
        [
            label,
            str(info.get("weights", "-")),
            str(info.get("acts", "-")),
            str(info.get("rounds", "-")),
            str(info.get("episodes", "-")),
            _format(info.get("gflops"), "{:,.0f}"),
            _format(info.get("seconds"), "{:,.0f}"),
            str(info.get("trained_on", "-")),
        ]
        for label, info in checkpoints.items()
        if any(label in results.checkpoints for results in task.arms.values())
    ]
    if not rows:
        return []
    header = ("trained controller", "weights", "acts", "rounds", "episodes", "GFLOPs", "seconds", "trained on")
    return [
        Paragraph("The cost of training the controllers, which is not part of any episode's cost:"),
        ReportTable(header, rows),
    ]


def growth_tables(task: TaskResults) -> list[Block]:
    """How often each op was taken, and the fate of seeds by blueprint and by slot."""
    by_blueprint = [row for name, results in task.arms.items() for row in _blueprint_rows(name, results)]
    slots = merge_slot_names(episode.slots for episode in task.episodes)
    taken = {step.choice for episode in task.episodes for step in episode.steps}
    ops = [name for op in Op for slot in (None, ALL_SLOTS) if (name := choice_name(op.name, slot)) in taken]
    by_slot, by_op = [], []
    for name, results in task.arms.items():
        episodes = results.episodes
        shares = [_mean(slot in episode.fossils for episode in episodes) for slot in slots]
        first_steps = [episode.germinations[0].step for episode in episodes if episode.germinations]
        by_slot.append([name, *(f"{share:.2f}" for share in shares), _format(_mean(first_steps), "{:.1f}")])
        counts = Counter(step.choice for episode in episodes for step in episode.steps)
        by_op.append([name, *(f"{counts[op] / len(episodes):.2f}" for op in ops)])
    tables: list[Block] = [ReportTable(("arm", *(f"{op} per episode" for op in ops)), by_op)]
    if by_blueprint:
        tables.append(ReportTable(("arm", "blueprint", "germinated", "fossilised", "pruned"), by_blueprint))
    header = ("arm", *(f"fossil in {slot}" for slot in slots), "step of the first germination")
    tables.append(ReportTable(header, by_slot))
    return [*tables, Paragraph("Means over episodes; arms that start with fossils germinate no seeds.")]


def _blueprint_rows(name: str, results: ArmResults) -> list[list[str]]:
    """Seeds per episode that germinated, fossilised or were pruned, for each blueprint of an arm."""
    counts: dict[str, list[int]] = {}
    for episode in results.episodes:
        for step in episode.steps:
            for blueprint, entered in zip(step.blueprint, step.entered, strict=True):
                if blueprint is not None:
                    own = counts.setdefault(blueprint, [0, 0, 0])
                    for index, stage in enumerate((Stage.GERMINATED, Stage.FOSSILIZED, Stage.PRUNED)):
                        own[index] += stage.name in entered
    ordered = sorted(counts.items(), key=lambda item: -item[1][0])
    return [[name, blueprint, *(f"{n / len(results.episodes):.2f}" for n in own)] for blueprint, own in ordered]


def _mean(values: Iterable[float | None]) -> float | None:
    """None if there is no value, or one is None."""
    entries = list(values)
    return None if not entries or None in entries else float(np.mean([value for value in entries if value is not None]))


def _format_gflops(flops: float | None) -> str:
    if flops is None or flops == 0 or flops >= 1e7:
        return _format(None if flops is None else flops / 1e9, "{:,.2f}")
    return f"{flops / 1e9:.1g}"  # so that a small cost is not rounded to zero


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
