"""The scale of returns: the critic learns in standard deviations from the mean return."""

import torch
from torch import Tensor, nn

from esper.controllers import Moments, RunningStatistics

LEAST = 1e-2  # standard deviation; returns that hardly vary are not blown up


class ReturnScale(nn.Module):
    """Turns returns into what the critic learns, and back.

    When the statistics move, the critic's last layer is moved against them, so that the values it gives stay what they
    were (van Hasselt et al. 2016, https://arxiv.org/abs/1602.07714).
    """

    def __init__(self, momentum: float | None = None) -> None:
        super().__init__()
        self.statistics = RunningStatistics(1, momentum)

    @property
    def mean(self) -> Tensor:
        return self.statistics.mean[0]

    @property
    def std(self) -> Tensor:
        return self.statistics.variance[0].sqrt().clamp(min=LEAST)

    def scaled(self, returns: Tensor) -> Tensor:
        return ((returns - self.mean) / self.std).to(returns.dtype)

    def unscaled(self, values: Tensor) -> Tensor:
        return (values * self.std + self.mean).to(values.dtype)

    @torch.no_grad()
    def fold(self, packed: Tensor, critic: nn.Sequential) -> None:
        """Take the moments of returns in; the critic ends in a linear layer."""
        *_, last = critic
        assert isinstance(last, nn.Linear)
        mean, std = self.mean.clone(), self.std.clone()
        self.statistics.fold(Moments.unpacked(packed))
        last.weight.mul_((std / self.std).to(last.weight.dtype))
        last.bias.copy_((last.bias * std + mean - self.mean) / self.std)
