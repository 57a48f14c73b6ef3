"""What image data sets in files have in common: trying one source after another, and verifying what was read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from esper.data.images import Labelled
from esper.data.store import DataError

Content = TypeVar("Content")


def download_first(title: str, root: Path, sources: Sequence[Callable[[Path], Content]]) -> Content:
    """What the first source that works downloads into `root`; each source is a function of `root`.

    Raises DataError with the reasons of all sources if none works.
    """
    failures = []
    for download_into in sources:
        try:
            return download_into(root)
        except DataError as error:
            failures.append(str(error).rstrip("."))
    raise DataError(f"{title} is not in {root} and cannot be downloaded: {'; '.join(failures)}.")


def verify_images(data: Labelled, *, classes: int, means: Sequence[float], part: str, source: str) -> None:
    """Raise DataError unless each class is equally frequent and the mean of each channel is the expected one.

    Arguments:
        data: the images, with any number of channels
        classes: number of classes
        means: of each channel, on the scale 0 to 255: a checksum that is the same for every file format
        part: train or test, for messages
        source: title and directory of the data set, for messages
    """
    counts = torch.bincount(data.labels).tolist()
    per_class = len(data) // classes
    if counts != [per_class] * classes:
        raise DataError(f"{source} is damaged: its {part} images per label are {counts}, not {per_class} each.")
    channels = [data.images[..., channel] for channel in range(len(means))]
    actual = [channel.sum().item() / channel.numel() for channel in channels]
    if any(abs(mean - expected) > 1e-6 for mean, expected in zip(actual, means, strict=True)):
        shown, allowed = (" / ".join(f"{mean:.3f}" for mean in values) for values in (actual, means))
        raise DataError(f"{source} is damaged: the mean of its {part} images is {shown}, not {allowed}.")
