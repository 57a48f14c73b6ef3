"""What is known of a run at one moment: the measurements, and the history that features are made from."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.lifecycle import Op, Slots

HISTORY = 5  # past losses and scores that are shown


@dataclass(frozen=True)
class HostMeasurements:
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
    isolated_gain: Tensor  # [envs, slots], how much lower the loss would be with a seed that trains behind the host

    def where(self, envs: Tensor, other: "HostMeasurements") -> "HostMeasurements":
        """Another's figures for the environments in `envs` [envs], these for the rest."""
        merge_provenance = {}
        for field in fields(self):
            mine, others = getattr(self, field.name), getattr(other, field.name)
            merge_provenance[field.name] = torch.where(envs if mine.ndim == 1 else envs.unsqueeze(1), others, mine)
        return HostMeasurements(**merge_provenance)


@dataclass(frozen=True)
class View:
    """Everything features are made from; tensors on the CPU."""

    step: int
    steps: int
    slots: Slots
    now: HostMeasurements
    losses: Tensor  # [envs, HISTORY], validation, latest last; NaN before the first
    scores: Tensor  # [envs, HISTORY]
    best: Tensor  # [envs], best score so far
    stale: Tensor  # [envs], steps since it was reached
    host_parameters: Tensor  # [envs]
    seed_parameters: Tensor  # [envs, slots]
    last_op: Tensor  # int64 [envs], Op value; -1 before the first action
    last_slot: Tensor  # int64 [envs]; -1 where the last op used none
    rollback: Tensor  # bool [envs], in the last step


def first_view(steps: int, slots: Slots, now: HostMeasurements, host_parameters: Tensor) -> View:
    """Before the first action."""
    envs, places = slots.stage.shape
    past = torch.full((envs, HISTORY), torch.nan)
    return View(
        step=0,
        steps=steps,
        slots=slots,
        now=now,
        losses=_shifted(past, now.loss),
        scores=_shifted(past, now.score),
        best=now.score,
        stale=torch.zeros(envs),
        host_parameters=host_parameters,
        seed_parameters=torch.zeros(envs, places),
        last_op=torch.full((envs,), -1),
        last_slot=torch.full((envs,), -1),
        rollback=torch.zeros(envs, dtype=torch.bool),
    )


def next_view(
    view: View, slots: Slots, now: HostMeasurements, seed_parameters: Tensor, op: Tensor, slot: Tensor, rollback: Tensor
) -> View:
    """After a step."""
    better = now.score > view.best
    return View(
        step=view.step + 1,
        steps=view.steps,
        slots=slots,
        now=now,
        losses=_shifted(view.losses, now.loss),
        scores=_shifted(view.scores, now.score),
        best=torch.maximum(view.best, now.score),
        stale=torch.where(better, torch.zeros_like(view.stale), view.stale + 1),
        host_parameters=view.host_parameters,
        seed_parameters=seed_parameters,
        last_op=op,
        last_slot=torch.where(op == Op.WAIT, torch.full_like(slot, -1), slot),
        rollback=rollback,
    )


def _shifted(past: Tensor, latest: Tensor) -> Tensor:
    return torch.cat([past[:, 1:], latest.unsqueeze(1)], 1)
