"""The parts of PPO's loss, as sums over steps, and their diagnostics.

Losses are sums, so that a minibatch may be split into chunks and over ranks; the caller divides by the count of the
whole minibatch. A sum over no step is 0, and so is its mean.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.ppo.distributed import gather_ranks, reduce_sum

# exp(20) is 5e8: far beyond any clip range, and its square is still finite in float32 (that of exp(88) is not)
LOG_RATIO_BOUND = 20.0
MIN_VARIANCE = 1e-9  # relative to squares; less is rounding
TINY = 1e-300


@dataclass(frozen=True)
class Surrogate:
    """Sums over steps, by head."""

    loss: Tensor  # [heads], of -min(r A, clip(r) A), weighted
    kl: Tensor  # [heads], of the estimate (r - 1) - log r, weighted
    clipped: Tensor  # [heads], number of ratios outside the clip range
    ratio_max: Tensor  # [], over active heads; 1 if none is active
    ratio_min: Tensor  # []


def surrogate(
    log_prob: Tensor, old_log_prob: Tensor, behaviour: Tensor, advantages: Tensor, active: Tensor, *, clip: float
) -> Surrogate:
    """The clipped surrogate objective of each head, over the steps where it is active.

    Actions were sampled from `behaviour`, in which every option has a minimum probability. Each step is weighted by
    old policy / behaviour of the whole action, so that the gradient is that of the policy alone, and rare options are
    not deprived of theirs; the ratio that is clipped is new / old policy, 1 before the first optimizer step (Hilton et
    al., 2022: decoupled PPO).

    log_prob, old_log_prob, behaviour, active: [steps, heads]; advantages: [steps]; all on one device, where the sums
    stay.
    """
    log_ratio = (log_prob - old_log_prob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    log_ratio = torch.where(active, log_ratio, 0.0)
    ratio = log_ratio.exp()
    weight = (old_log_prob - behaviour).sum(-1).exp()
    advantages = advantages * weight
    by_head = advantages.unsqueeze(-1)
    loss = -torch.minimum(ratio * by_head, ratio.clamp(1 - clip, 1 + clip) * by_head)
    kl = weight.unsqueeze(-1) * ((ratio - 1) - log_ratio)
    outside = (ratio - 1).abs() > clip
    detached = ratio.detach()
    return Surrogate(
        loss=torch.where(active, loss, 0.0).sum(0),
        kl=kl.detach().sum(0),
        clipped=(outside & active).sum(0),
        ratio_max=detached.amax() if detached.numel() else detached.new_ones(()),
        ratio_min=detached.amin() if detached.numel() else detached.new_ones(()),
    )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, valid: Tensor, *, kind: str, bound: float
) -> Tensor:
    """The critic's loss, summed over valid steps; all tensors are of one shape, in units of the return scale.

    `clipped` is the larger of two squared errors: of the value, and of the value clipped to `bound` around the old
    one. `huber` is quadratic up to `bound` and linear beyond. `squared` does not use `bound`.
    """
    if kind == "huber":
        loss = F.huber_loss(values, returns, delta=bound, reduction="none")
    elif kind == "clipped":
        clipped = old_values + (values - old_values).clamp(-bound, bound)
        loss = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
    else:
        loss = 0.5 * (values - returns).square()
    return torch.where(valid, loss, 0.0).sum()


def masked_mean(total: Tensor, count: Tensor) -> Tensor:
    """A sum divided by its count; exactly 0 where the count is 0."""
    return torch.where(count > 0, total / torch.where(count > 0, count, 1.0), 0.0)


def normalise(advantages: Tensor, mean: Tensor, std: Tensor, *, min_std: float) -> Tensor:
    """Advantages in standard deviations from their mean; the standard deviation is clamped to at least `min_std`."""
    return (advantages - mean) / std.clamp(min=min_std)


def explained_variance(values: Tensor, returns: Tensor, known: Tensor, valid: Tensor, tasks: Tensor) -> Tensor:
    """The share of the variance of returns that values explain beyond what is already known; NaN if nothing varies.

    Among the episodes of a task at the same step, of all ranks, the part of returns and of errors that is linear in
    `known` is subtracted. Values that are constant, depend on the step only, or on what is already known only, have 0
    therefore; right ones have 1.

    Arguments:
        values, returns: [envs, steps], of the rest of the episode
        known: [envs, steps], the reward collected before each step
        valid: bool [envs, steps]
        tasks: int64 [envs], the same number for episodes of the same task
    """
    parts = torch.stack([torch.ones_like(returns), known, returns, returns - values], -1).double()
    parts = torch.where(valid.unsqueeze(-1), parts, 0.0)
    products = reduce_sum(torch.einsum("eg,esi,esj->gsij", group_tasks(tasks), parts, parts))
    count = products[..., :1, :1].clamp(min=1)
    centred = products - products[..., :, :1] * products[..., :1, :] / count
    known_variance = centred[..., 1, 1]
    varies = known_variance > MIN_VARIANCE * products[..., 1, 1]
    slopes = torch.where(varies.unsqueeze(-1), centred[..., 1, :] / known_variance.clamp(min=TINY).unsqueeze(-1), 0.0)
    rest = centred.diagonal(dim1=-2, dim2=-1) - slopes * centred[..., 1, :]  # [tasks, steps, parts]
    _, _, variance, error = rest.clamp(min=0).sum((0, 1))
    squares = products[..., 2, 2].sum()
    return torch.where(variance > MIN_VARIANCE * squares, 1 - error / variance.clamp(min=TINY), torch.nan)


def group_tasks(tasks: Tensor) -> Tensor:
    """Which task of the round, of all ranks, each episode has: float64 [envs, tasks], with one 1 in each row."""
    numbers: Tensor = gather_ranks(tasks).unique()  # type: ignore[no-untyped-call]
    return (tasks.unsqueeze(1) == numbers).double()


def anneal(start: float, final: float | None, rounds: int, done: int) -> float:
    """Linear from `start` to `final` over `rounds` rounds, constant afterwards; `final` None is constant."""
    if final is None:
        return start
    return start + (final - start) * min(done / max(rounds, 1), 1.0)
