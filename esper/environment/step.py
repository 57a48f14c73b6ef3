"""What a step gives back."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from esper.environment.record import StepRecord
from esper.observation import Observation


class RewardResult(Protocol):
    """What a reward gives for a step: its total [envs], the parts it is the sum of, and findings worth an event."""

    @property
    def total(self) -> Tensor: ...

    @property
    def parts(self) -> dict[str, Tensor]: ...

    @property
    def findings(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class GrowthStep:
    """All that comes of one decision."""

    observation: Observation
    reward: Tensor  # float32 [envs]
    rewarded: RewardResult
    terminated: Tensor  # bool [envs]
    truncated: Tensor  # bool [envs]
    record: StepRecord
