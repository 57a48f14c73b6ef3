"""The record of one step: tensors for all environments, on the CPU."""

from dataclasses import dataclass

from torch import Tensor

from esper.lifecycle import Decision, Slots
from esper.observation import HostMeasurements


@dataclass(frozen=True)
class StepRecord:
    """One step of all environments; rewards are pure functions of it."""

    step: int  # index in the episode, from 0
    steps: int  # of the whole episode
    decision: Decision
    acted: Tensor  # bool [envs, slots], the slots that the action was in; none for WAIT
    before: Slots  # when the action was chosen
    during: Slots  # after the action, while the host trains
    after: Slots  # after the lifecycle tick
    entered: Tensor  # bool [envs, slots, stages]: stages entered in this step
    earlier: HostMeasurements  # before the action
    now: HostMeasurements  # after training
    initial_score: Tensor  # [envs], of the untrained host
    host_parameters: Tensor  # [envs]
    seed_parameters: Tensor  # [envs, slots], of the seeds that train in this step
    batches: Tensor  # int64 [envs], training batches of this step
    rollback: Tensor  # int64 [envs], RollbackReason values; 0 is none
    terminated: Tensor  # bool [envs]
    truncated: Tensor  # bool [envs]


def net_score(score: Tensor, growth: Tensor, rent: float = 1.0) -> Tensor:
    """The score that episodes are compared by, [envs]: `rent` points less for each factor e of growth in parameters."""
    return score - rent * growth.log()
