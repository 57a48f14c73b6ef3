"""The two shapes that most seeds share. Both are exactly the identity at birth, and alive."""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """x + branch(x), where the branch's last layer starts at zero.

    Nothing stands behind that layer, so its gradient is neither blocked by a non-linearity nor amplified by a
    normalisation.
    """

    def __init__(self, *branch: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)
        for parameter in branch[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.branch(x)
        return out


class FadedNorm(nn.Module):
    """A normalisation, faded in by a learned scale that starts at zero."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.scale) * (self.norm(x) - x)
        return out
