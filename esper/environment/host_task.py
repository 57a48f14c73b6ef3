"""What the episodes of one task have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from esper.data import Data
from esper.hosts import Host


@dataclass(frozen=True)
class KnownScores:
    """Mean validation scores of a task that were measured before."""

    none: float  # without growth
    best: float | None = None  # of the best known plan; None is not known


@dataclass(frozen=True)
class HostTask:
    """A host, the data that it trains on, and how.

    Arguments:
        build: builds the host
        data: the data set, or a variant of one
        batch: samples in a training batch; 0 is that of the environment
        variants: functions that build wider and deeper hosts, by name
        lr_scale: factor of all learning rates
        budget_batches: budget of an episode, in training batches of the host without seeds; None is that of the
            environment
        family: kind of task, for balanced drawing and for metrics
        split: which episodes draw the task: train, validation, test or heldout; None is all of them
        label_noise: share of training labels that are wrong
        known: scores that were measured before; None is not known
    """

    build: Callable[[], Host]
    data: Data
    batch: int = 0
    variants: Mapping[str, Callable[[], Host]] = field(default_factory=dict)
    lr_scale: float = 1.0
    budget_batches: float | None = None
    family: str = ""
    split: str | None = None
    label_noise: float = 0.0
    known: KnownScores | None = None

    def with_batch(self, batch: int) -> "HostTask":
        """The task with `batch` samples in a training batch, unless it has its own number."""
        resolved = replace(self, batch=self.batch or batch)
        size = self.data.size("train")
        if not 1 <= resolved.batch <= size:
            raise ValueError(
                f"environment.batch={resolved.batch}: must be between 1 and the {size:,} training samples."
            )
        return resolved
