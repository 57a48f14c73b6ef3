"""The parts of PPO's loss as sums over steps, and the figures that say how an update goes.

Losses come as sums, so that a minibatch may be worked off in chunks and over ranks; whoever calls divides by how much
was counted in all. Where nothing counts, sums are 0 and so are the means made from them.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_RATIO_BOUND = (
    20.0  # exp(20) is 5e8: far beyond any clip, and its square is still finite in float32 (exp(88) is not)
)


@dataclass(frozen=True)
class Surrogate:
    """Sums over steps, by head."""

    loss: Tensor  # [heads], of -min(r A, clip(r) A)
    kl: Tensor  # [heads], of the estimate (r - 1) - log r
    clipped: Tensor  # [heads], how many ratios lay outside the clip range
    largest: Tensor  # [], the largest ratio of an active head; 1 without one
    smallest: Tensor  # []


def surrogate(log_prob: Tensor, old: Tensor, advantages: Tensor, active: Tensor, *, clip: float) -> Surrogate:
    """The clipped surrogate of each head, over the steps where it took part and had a choice.

    log_prob, old, active: [steps, heads]; advantages: [steps]; all on one device, where the sums stay.
    """
    log_ratio = (log_prob - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    log_ratio = torch.where(active, log_ratio, 0.0)
    ratio = log_ratio.exp()
    gains = advantages.unsqueeze(-1)
    loss = -torch.minimum(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains)
    kl = (ratio - 1) - log_ratio
    outside = (ratio - 1).abs() > clip
    seen = ratio.detach()
    return Surrogate(
        loss=torch.where(active, loss, 0.0).sum(0),
        kl=kl.detach().sum(0),
        clipped=(outside & active).sum(0),
        largest=seen.amax() if seen.numel() else seen.new_ones(()),
        smallest=seen.amin() if seen.numel() else seen.new_ones(()),
    )


def value_loss(values: Tensor, old: Tensor, returns: Tensor, valid: Tensor, *, kind: str, bound: float) -> Tensor:
    """The critic's loss, summed over valid steps; all tensors are of one shape, in units of the return scale.

    `clipped` is the worse of two squares: of the value, and of the value held within `bound` of the old one. `huber`
    is square up to `bound` and straight beyond. `squared` knows no bound.
    """
    if kind == "huber":
        loss = F.huber_loss(values, returns, delta=bound, reduction="none")
    elif kind == "clipped":
        held = old + (values - old).clamp(-bound, bound)
        loss = 0.5 * torch.maximum((values - returns).square(), (held - returns).square())
    else:
        loss = 0.5 * (values - returns).square()
    return torch.where(valid, loss, 0.0).sum()


def masked_mean(total: Tensor, count: Tensor) -> Tensor:
    """A sum by its count; exactly 0 where nothing was counted."""
    return torch.where(count > 0, total / torch.where(count > 0, count, 1.0), 0.0)


def normalised(advantages: Tensor, mean: Tensor, std: Tensor, *, min_std: float) -> Tensor:
    """Advantages in standard deviations from their mean; a deviation counts at least `least`."""
    return (advantages - mean) / std.clamp(min=min_std)


def explained_variance(error: Tensor, spread: Tensor) -> Tensor:
    """The share of the returns' variance `spread` that values foretold, `error` being the variance of what is left.

    It is 0 where returns do not vary.
    """
    return torch.where(spread > 0, 1 - error / spread.clamp(min=1e-12), 0.0)


def annealed(start: float, final: float | None, over: int, done: int) -> float:
    """A value that goes from start to final in a straight line over so many rounds, and stays there."""
    if final is None:
        return start
    return start + (final - start) * min(done / max(over, 1), 1.0)
