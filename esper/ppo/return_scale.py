"""Normalised returns: the critic predicts standard deviations from the mean return."""

import torch
from torch import Tensor, nn

from esper.controllers import Moments, RunningStatistics

MIN_STD = 1e-2  # returns that hardly vary are not amplified


class ReturnScale(nn.Module):
    """Normalises returns by running statistics.

    When the statistics change, the critic's last layer is rescaled, so that its denormalised values do not change
    (PopArt: van Hasselt et al. 2016, https://arxiv.org/abs/1602.07714).
    """

    def __init__(self, momentum: float | None = None) -> None:
        super().__init__()
        self.statistics = RunningStatistics(1, momentum)

    @property
    def mean(self) -> Tensor:
        return self.statistics.mean[0]

    @property
    def std(self) -> Tensor:
        return self.statistics.variance[0].sqrt().clamp(min=MIN_STD)

    def normalise(self, returns: Tensor) -> Tensor:
        return ((returns - self.mean) / self.std).to(returns.dtype)

    def denormalise(self, values: Tensor) -> Tensor:
        return (values * self.std + self.mean).to(values.dtype)

    @torch.no_grad()
    def fold(self, packed: Tensor, critic: nn.Sequential) -> None:
        """Add packed moments of returns to the statistics; rescale the critic, which must end in a linear layer."""
        *_, last = critic
        assert isinstance(last, nn.Linear)
        mean, std = self.mean.clone(), self.std.clone()
        self.statistics.fold(Moments.unpacked(packed))
        last.weight.mul_((std / self.std).to(last.weight.dtype))
        last.bias.copy_((last.bias * std + mean - self.mean) / self.std)
