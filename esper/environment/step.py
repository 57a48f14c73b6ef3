"""The result of a step."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from esper.environment.record import StepRecord
from esper.observation import Observation


class RewardResult(Protocol):
    """The reward of a step: its total, the terms that add up to it, and the findings of detectors."""

    @property
    def total(self) -> Tensor:
        """float32 [envs]."""

    @property
    def parts(self) -> dict[str, Tensor]:
        """By term, float32 [envs]."""

    @property
    def findings(self) -> dict[str, Tensor]:
        """By detector, bool [envs, slots]."""


@dataclass(frozen=True)
class GrowthStep:
    """The result of one step of all environments."""

    observation: Observation
    reward: Tensor  # float32 [envs]
    rewarded: RewardResult
    terminated: Tensor  # bool [envs]
    truncated: Tensor  # bool [envs]
    record: StepRecord
