"""A reward term of one's own: a pure function of what a step has led to."""

from dataclasses import dataclass

from torch import Tensor

from esper.environment import StepRecord


@dataclass(frozen=True)
class Thrift:
    """A price for each parameter that was added in this step, in thousands; weight is negative."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * (record.now.parameters - record.earlier.parameters) / 1000
