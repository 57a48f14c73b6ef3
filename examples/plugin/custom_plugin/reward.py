"""A custom reward term: a pure function of the record of one step."""

from dataclasses import dataclass

from torch import Tensor

from esper.environment import StepRecord


@dataclass(frozen=True)
class ParameterCost:
    """A cost for the parameters that one step adds.

    Arguments:
        weight: reward for each thousand parameters; negative
    """

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * (record.now.parameters - record.earlier.parameters) / 1000
