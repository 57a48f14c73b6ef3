"""Running mean and variance, for observations and returns."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Moments:
    """Of some samples: how many, the sums and the sums of squares of each feature, in float64."""

    count: Tensor  # []
    total: Tensor  # [features]
    squares: Tensor  # [features]

    @classmethod
    def of(cls, samples: Tensor, valid: Tensor) -> "Moments":
        """`samples` [..., features], of which those count where `valid` [...] is true."""
        picked = torch.where(valid.unsqueeze(-1), samples, 0).flatten(0, -2).double()
        return cls(valid.sum().double(), picked.sum(0), picked.square().sum(0))

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        return (self.squares / self.count.clamp(min=1) - self.mean.square()).clamp(min=0)

    def packed(self) -> Tensor:
        """As one tensor, which can be summed over ranks."""
        return torch.cat([self.count.reshape(1), self.total, self.squares])

    @classmethod
    def unpacked(cls, packed: Tensor) -> "Moments":
        total, squares = packed[1:].chunk(2)
        return cls(packed[0], total, squares)


class RunningStatistics(nn.Module):
    """Mean and variance of all samples so far, or with `momentum` of the latest above all.

    Not safe to fold from several threads at once; only the thread that updates the policy does.

    Arguments:
        width: features
        momentum: weight of the newest moments; None weighs every sample the same
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, width: int, momentum: float | None = None) -> None:
        super().__init__()
        if momentum is not None and not 0 < momentum <= 1:
            raise ValueError(f"momentum={momentum}: must be above 0, at most 1, or null.")
        self._momentum = momentum
        self.register_buffer("mean", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(width, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def fold(self, moments: Moments) -> None:
        """Take new samples in; none, or any that are not finite, leave everything as it was."""
        sound = (moments.total.isfinite() & moments.squares.isfinite()).all()
        mean = torch.where(sound, moments.mean, self.mean)
        variance = torch.where(sound, moments.variance, self.variance)
        share = moments.count / (self.count + moments.count).clamp(min=1)
        if self._momentum is not None:
            share = torch.where(share < 1, self._momentum * moments.count.sign(), share)  # the first are taken whole
        share = torch.where(sound, share, 0.0)
        shift = mean - self.mean
        self.variance.add_(share * (variance - self.variance + (1 - share) * shift.square()))
        self.mean.add_(share * shift)
        self.count.add_(torch.where(sound, moments.count, 0.0))

    def normalised(self, samples: Tensor, *, min_std: float, clip: float) -> Tensor:
        """Samples in standard deviations from the mean; a deviation counts at least `least`, the result at most `most`.

        Before anything was folded in, samples stay as they are.
        """
        deviation = self.variance.sqrt().clamp(min=min_std)
        scaled = ((samples - self.mean) / deviation).to(samples.dtype).clamp(-clip, clip)
        return torch.where(self.count > 0, scaled, samples)
