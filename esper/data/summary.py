"""Summaries of downloaded data sets."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from esper.data import cifar10, fashion_mnist, tinystories
from esper.data.images import Labelled


def _summarise_cifar10(root: Path) -> str:
    known, unseen = cifar10.read_cifar10(root)
    return "\n".join([_summarise_images("cifar10", root, cifar10.CLASSES, known, unseen), _summarise_channels(known)])


def _summarise_fashion_mnist(root: Path) -> str:
    data = fashion_mnist.read_fashion_mnist(root)
    rows = [_summarise_images(data.name, root, fashion_mnist.GARMENTS, data.known, data.unseen)]
    rows.append(_summarise_channels(data.known))
    if data.name != "fashion_mnist":
        rows.append(f"  The split is our own, of {fashion_mnist.FASHION_MNIST_PACKAGE.name}: scores are not comparable")
        rows.append("  with those on the official split.")
    return "\n".join(rows)


def _summarise_images(name: str, root: Path, classes: Sequence[str], known: Labelled, unseen: Labelled) -> str:
    width = max(map(len, classes))
    counts = [torch.bincount(part.labels, minlength=len(classes)) for part in (known, unseen)]
    rows = [f"  {'class':<{width}}   train    test"]
    rows += [f"  {title:<{width}}  {a:>6,}  {b:>6,}" for title, a, b in zip(classes, *counts, strict=True)]
    rows.append(f"  {'all':<{width}}  {len(known):>6,}  {len(unseen):>6,}")
    size = "x".join(map(str, known.images.shape[1:]))
    return "\n".join([f"{name}: {len(known) + len(unseen):,} images of {size} in {root}", *rows])


def _summarise_channels(part: Labelled) -> str:
    channels = part.images.shape[3]
    names = "red / green / blue" if channels == 3 else "grey"
    pixels = part.images.reshape(-1, channels)
    levels = torch.arange(256, dtype=torch.float64)
    lines = []
    histograms = [torch.bincount(pixels[:, channel].int(), minlength=256) / len(pixels) for channel in range(channels)]
    means = [(share * levels).sum() for share in histograms]
    stds = [(share * (levels - mean) ** 2).sum().sqrt() for share, mean in zip(histograms, means, strict=True)]
    for title, values in (("mean", means), ("std", stds)):
        lines.append(f"  train {title:<4} ({names}): " + " / ".join(f"{value:.2f}" for value in values))
    return "\n".join(lines)


def _summarise_tinystories(root: Path) -> str:
    rows = [f"tinystories in {root}"]
    for part, path in tinystories.find(root).items():
        stories = tinystories.read_stories(path, require_separators=part == "train")
        size = sum(len(story.encode()) for story in stories)
        count = f"{len(stories):>9,} stories" if len(stories) > 1 else f"{'no separators':>17}"
        rows.append(f"  {part:<5}  {count}  {size:>13,} bytes of text  {path}")
    return "\n".join(rows)


SUMMARIES: dict[str, Callable[[Path], str]] = {
    "cifar10": _summarise_cifar10,
    "fashion_mnist": _summarise_fashion_mnist,
    "tinystories": _summarise_tinystories,
}
