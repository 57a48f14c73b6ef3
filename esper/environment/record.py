"""What one step did: tensors for all environments, on the CPU."""

from dataclasses import dataclass

from torch import Tensor

from esper.lifecycle import Decision, Slots
from esper.observation import HostMeasurements


@dataclass(frozen=True)
class StepRecord:
    """One step of all environments; rewards are functions of it."""

    step: int  # of the episode, from 0
    steps: int  # of a whole episode
    decision: Decision
    before: Slots  # when the action was chosen
    during: Slots  # in the epoch that followed
    after: Slots  # when the clock had ticked
    entered: Tensor  # bool [envs, slots, stages]: stages entered in this step
    earlier: HostMeasurements  # before the action
    now: HostMeasurements  # after the epoch
    initial_score: Tensor  # [envs], of the untrained host
    host_parameters: Tensor  # [envs]
    seed_parameters: Tensor  # [envs, slots], of the seeds that were there in the epoch
    rollback: Tensor  # int64 [envs], governor.Reason values; 0 is none
    terminated: Tensor  # bool [envs]
    truncated: Tensor  # bool [envs]


def net_score(score: Tensor, growth: Tensor) -> Tensor:
    """What episodes are compared by: the score less one point for each factor e of growth in parameters; [envs]."""
    return score - growth.log()
