"""The state that features are computed from: latest measurements and a short history."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.lifecycle import Slots
from esper.observation.descriptors import Descriptors

HISTORY = 5  # losses and scores that a view holds, the latest included


@dataclass(frozen=True)
class HostMeasurements:
    """The measurements of one step. NaN means not measured."""

    train_loss: Tensor  # [envs]
    train_accuracy: Tensor  # [envs], 0 to 1
    loss: Tensor  # [envs], validation
    accuracy: Tensor  # [envs], validation, 0 to 1
    score: Tensor  # [envs], accuracy in points, or bits per byte times -100
    gradient_norm: Tensor  # [envs], of the host, before clipping
    health: Tensor  # [envs], of the host's gradients
    parameters: Tensor  # [envs], of the host and its seeds; after the last step, only of committed seeds
    flops: Tensor  # float64 [envs], since the start of the episode
    contribution: Tensor  # [envs, slots], score with the seed minus score without it
    loss_contribution: Tensor  # [envs, slots], loss without the seed minus loss with it; the latest measurement
    progress: Tensor  # [envs, slots], change of the score since the seed germinated
    seed_gradient_norm: Tensor  # [envs, slots]
    seed_health: Tensor  # [envs, slots]
    isolated_gain: Tensor  # [envs, slots], training loss minus the loss with the isolated seed

    def where(self, envs: Tensor, other: "HostMeasurements") -> "HostMeasurements":
        """The measurements of `other` where `envs`, bool [envs], is true, else these."""
        merged = {}
        for field in fields(self):
            mine, others = getattr(self, field.name), getattr(other, field.name)
            merged[field.name] = torch.where(envs if mine.ndim == 1 else envs.unsqueeze(1), others, mine)
        return HostMeasurements(**merged)


@dataclass(frozen=True)
class ClockView:
    """What features without a scale need besides measurements; tensors on the CPU."""

    spent: Tensor  # [envs], share of the episode that is over
    lr_left: Tensor  # [envs], share of the learning rate's sum over the episode that is left
    passes: Tensor  # [envs], the episode in passes of the host without seeds over the training set
    cost: Tensor  # [envs], training FLOPs of a sample now, relative to the host without seeds
    seed_cost: Tensor  # [envs, slots], of that, each seed's
    start: Tensor  # [envs, slots], `spent` when each seed germinated; NaN without a seed
    first_loss: Tensor  # [envs], the first validation loss
    chance_loss: Tensor  # [envs], the loss at chance level
    fresh: Tensor  # bool [envs], whether the latest step was measured

    def next_start(self, germinated: Tensor, occupied: Tensor) -> Tensor:
        """`start` after a step; both are bool [envs, slots]: seeds that germinated in it, and slots that have one."""
        start = torch.where(germinated, self.spent.unsqueeze(1).expand_as(self.start), self.start)
        return torch.where(occupied, start, torch.nan)


@dataclass(frozen=True)
class View:
    """Everything that features are computed from; tensors on the CPU."""

    step: int  # finished steps of the episode
    steps: int  # of the whole episode
    slots: Slots
    now: HostMeasurements
    losses: Tensor  # [envs, HISTORY], validation, latest last; NaN where there are fewer
    scores: Tensor  # [envs, HISTORY]
    best: Tensor  # [envs], highest score so far
    stale: Tensor  # [envs], steps since the highest score
    host_parameters: Tensor  # [envs]
    seed_parameters: Tensor  # [envs, slots]
    last_op: Tensor  # int64 [envs], Op value; -1 before the first step
    last_slots: Tensor  # bool [envs, slots], whether the last op acted in the slot
    rollback: Tensor  # bool [envs], whether the last step ended in a rollback
    descriptors: Descriptors
    clock: ClockView | None = None  # None where there is no host


def first_view(
    steps: int,
    slots: Slots,
    now: HostMeasurements,
    host_parameters: Tensor,
    descriptors: Descriptors,
    clock: ClockView | None = None,
) -> View:
    """The view before the first action."""
    envs, slot_count = slots.stage.shape
    past = torch.full((envs, HISTORY), torch.nan)
    return View(
        step=0,
        steps=steps,
        slots=slots,
        now=now,
        losses=_append(past, now.loss),
        scores=_append(past, now.score),
        best=now.score,
        stale=torch.zeros(envs),
        host_parameters=host_parameters,
        seed_parameters=torch.zeros(envs, slot_count),
        last_op=torch.full((envs,), -1),
        last_slots=torch.zeros(envs, slot_count, dtype=torch.bool),
        rollback=torch.zeros(envs, dtype=torch.bool),
        descriptors=descriptors,
        clock=clock,
    )


def next_view(
    view: View,
    slots: Slots,
    now: HostMeasurements,
    seed_parameters: Tensor,
    op: Tensor,
    acted: Tensor,
    rollback: Tensor,
    clock: ClockView | None = None,
) -> View:
    """The view after a step; its actions had Op values `op` [envs] in the slots `acted`, bool [envs, slots]."""
    better = now.score > view.best
    return View(
        step=view.step + 1,
        steps=view.steps,
        slots=slots,
        now=now,
        losses=_append(view.losses, now.loss),
        scores=_append(view.scores, now.score),
        best=torch.maximum(view.best, now.score),
        stale=torch.where(better, torch.zeros_like(view.stale), view.stale + 1),
        host_parameters=view.host_parameters,
        seed_parameters=seed_parameters,
        last_op=op,
        last_slots=acted,
        rollback=rollback,
        descriptors=view.descriptors,
        clock=clock,
    )


def _append(past: Tensor, latest: Tensor) -> Tensor:
    """Drop the oldest column and append `latest` [envs]."""
    return torch.cat([past[:, 1:], latest.unsqueeze(1)], 1)
