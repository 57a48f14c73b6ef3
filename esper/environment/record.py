"""What is known at one moment, and what one step did: tensors for all environments, on the CPU."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.lifecycle import Decision, Slots


@dataclass(frozen=True)
class Measured:
    """One moment's figures. What was not measured is NaN."""

    train_loss: Tensor  # [envs]
    train_accuracy: Tensor  # [envs], a share
    loss: Tensor  # [envs], validation
    accuracy: Tensor  # [envs], validation, a share
    score: Tensor  # [envs], what counts: accuracy in points, or bits per byte times -100
    gradient_norm: Tensor  # [envs], host, before clipping
    health: Tensor  # [envs], of the host's gradients
    parameters: Tensor  # [envs], of the host and the seeds that count
    flops: Tensor  # [envs] float64, spent since the episode began
    contribution: Tensor  # [envs, slots], score with the seed minus score without it
    progress: Tensor  # [envs, slots], score gained since the seed germinated
    seed_gradient_norm: Tensor  # [envs, slots]
    seed_health: Tensor  # [envs, slots]
    promise: Tensor  # [envs, slots], how much lower the loss would be with a seed that trains behind the host

    def where(self, envs: Tensor, other: "Measured") -> "Measured":
        """Another's figures for the environments in `envs` [envs], these for the rest."""
        merged = {}
        for field in fields(self):
            mine, others = getattr(self, field.name), getattr(other, field.name)
            merged[field.name] = torch.where(envs if mine.ndim == 1 else envs.unsqueeze(1), others, mine)
        return Measured(**merged)


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
    earlier: Measured  # before the action
    now: Measured  # after the epoch
    initial_score: Tensor  # [envs], of the untrained host
    host_parameters: Tensor  # [envs]
    seed_parameters: Tensor  # [envs, slots], of the seeds that were there in the epoch
    rollback: Tensor  # int64 [envs], governor.Reason values; 0 is none
    terminated: Tensor  # bool [envs]
    truncated: Tensor  # bool [envs]


def rated(score: Tensor, growth: Tensor) -> Tensor:
    """What episodes are compared by: the score less one point for each factor e of growth in parameters; [envs]."""
    return score - growth.log()
