"""Summaries of downloaded data sets."""

from collections.abc import Callable
from pathlib import Path

import torch

from esper.data import cifar10, tinystories
from esper.data.images import Labelled


def _summarise_cifar10(root: Path) -> str:
    known, unseen = cifar10.read_cifar10(root)
    width = max(map(len, cifar10.CLASSES))
    counts = [torch.bincount(part.labels, minlength=len(cifar10.CLASSES)) for part in (known, unseen)]
    rows = [f"  {'class':<{width}}   train    test"]
    rows += [f"  {name:<{width}}  {a:>6,}  {b:>6,}" for name, a, b in zip(cifar10.CLASSES, *counts, strict=True)]
    rows.append(f"  {'all':<{width}}  {len(known):>6,}  {len(unseen):>6,}")
    title = f"cifar10: {len(known) + len(unseen):,} images of 32x32x3 in {root}"
    return "\n".join([title, *rows, _summarise_channels(known)])


def _summarise_channels(part: Labelled) -> str:
    pixels = part.images.reshape(-1, 3)
    levels = torch.arange(256, dtype=torch.float64)
    lines = []
    histograms = [torch.bincount(pixels[:, channel].int(), minlength=256) / len(pixels) for channel in range(3)]
    means = [(share * levels).sum() for share in histograms]
    stds = [(share * (levels - mean) ** 2).sum().sqrt() for share, mean in zip(histograms, means, strict=True)]
    for title, values in (("mean", means), ("std", stds)):
        lines.append(f"  train {title:<4} (red / green / blue): " + " / ".join(f"{value:.2f}" for value in values))
    return "\n".join(lines)


def _summarise_tinystories(root: Path) -> str:
    rows = [f"tinystories in {root}"]
    for part, path in tinystories.find(root).items():
        stories = tinystories.read_stories(path, require_separators=part == "train")
        size = sum(len(story.encode()) for story in stories)
        count = f"{len(stories):>9,} stories" if len(stories) > 1 else f"{'no separators':>17}"
        rows.append(f"  {part:<5}  {count}  {size:>13,} bytes of text  {path}")
    return "\n".join(rows)


SUMMARIES: dict[str, Callable[[Path], str]] = {"cifar10": _summarise_cifar10, "tinystories": _summarise_tinystories}
