"""Running mean and variance, for observations and returns."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Moments:
    """Sample count, and the sum and sum of squares of each feature, in float64."""

    count: Tensor  # []
    total: Tensor  # [features]
    squares: Tensor  # [features]

    @classmethod
    def of(cls, samples: Tensor, valid: Tensor) -> "Moments":
        """Moments of the `samples` [..., features] where `valid` [...] is true."""
        values = torch.where(valid.unsqueeze(-1), samples, 0).flatten(0, -2).double()
        return cls(valid.sum().double(), values.sum(0), values.square().sum(0))

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        return (self.squares / self.count.clamp(min=1) - self.mean.square()).clamp(min=0)

    def packed(self) -> Tensor:
        """All moments as one tensor, which can be summed over ranks."""
        return torch.cat([self.count.reshape(1), self.total, self.squares])

    @classmethod
    def unpacked(cls, packed: Tensor) -> "Moments":
        """The moments of a tensor from `packed`."""
        total, squares = packed[1:].chunk(2)
        return cls(packed[0], total, squares)


class RunningStatistics(nn.Module):
    """Running mean and variance of all samples, or a moving average with `momentum`.

    `fold` is not safe to call from several threads; only the thread that updates the policy calls it.

    Arguments:
        width: number of features
        momentum: weight of the newest moments; None weighs every sample equally
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, width: int, momentum: float | None = None) -> None:
        super().__init__()
        if momentum is not None and not 0 < momentum <= 1:
            raise ValueError(f"momentum={momentum}: must be above 0 and at most 1, or null.")
        self._momentum = momentum
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(width, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def fold(self, moments: Moments) -> None:
        """Add new moments; moments without samples or with non-finite values change nothing."""
        is_finite = (moments.total.isfinite() & moments.squares.isfinite()).all()
        mean = torch.where(is_finite, moments.mean, self.mean)
        variance = torch.where(is_finite, moments.variance, self.variance)
        share = moments.count / (self.count + moments.count).clamp(min=1)
        if self._momentum is not None:
            share = torch.where(
                share < 1, self._momentum * moments.count.sign(), share
            )  # the first moments count in full
        share = torch.where(is_finite, share, 0.0)
        shift = mean - self.mean
        self.variance.add_(share * (variance - self.variance + (1 - share) * shift.square()))
        self.mean.add_(share * shift)
        self.count.add_(torch.where(is_finite, moments.count, 0.0))

    def normalised(self, samples: Tensor, *, min_std: float, clip: float) -> Tensor:
        """(samples - mean) / max(standard deviation, min_std), clipped to [-clip, clip].

        Before the first `fold`, samples are returned unchanged.
        """
        std = self.variance.sqrt().clamp(min=min_std)
        scaled = ((samples - self.mean) / std).to(samples.dtype).clamp(-clip, clip)
        return torch.where(self.count > 0, scaled, samples)
