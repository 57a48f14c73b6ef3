"""A host of one's own: segments in order, and a slot after each but the last."""

from typing import ClassVar

from torch import nn

from esper.hosts import Host, Slot


class Stairs(Host):
    """Strided convolutions that halve the image and double the channels, then a linear classifier."""

    topology: ClassVar[str] = "cnn"  # which blueprints fit its features

    def __init__(self, *, steps: int, channels: int, classes: int) -> None:
        widths = [channels << step for step in range(steps)]
        segments = [
            nn.Sequential(nn.Conv2d(before, width, 2, stride=2), nn.ReLU())
            for before, width in zip([3, *widths], widths, strict=False)
        ]
        end = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
        slots = [Slot(f"step{number}", width) for number, width in enumerate(widths, 1)]
        super().__init__([*segments, end], slots)
