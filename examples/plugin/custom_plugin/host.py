"""A custom host: segments in order, with a slot after each but the last."""

from typing import ClassVar

from torch import nn

from esper.hosts import Host, Slot


class CustomHost(Host):
    """Strided convolutions that halve the image and double the channels, then a linear classifier.

    Arguments:
        blocks: number of convolutions, each followed by a slot
        channels: channels of the first block; each further block has twice as many
        classes: number of classes
    """

    topology: ClassVar[str] = "cnn"  # the blueprints that fit its features

    def __init__(self, *, blocks: int, channels: int, classes: int) -> None:
        widths = [channels << index for index in range(blocks)]
        segments = [
            nn.Sequential(nn.Conv2d(before, width, 2, stride=2), nn.ReLU())
            for before, width in zip([3, *widths], widths, strict=False)
        ]
        classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
        slots = [Slot(f"block{number}", width) for number, width in enumerate(widths, 1)]
        super().__init__([*segments, classifier], slots)
