"""Two layers that most blueprints use. When new, both are exactly the identity and have non-zero gradients."""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """x + branch(x), with the branch's last layer initialised to zero.

    Nothing follows that layer in the branch, so no non-linearity blocks its gradient and no normalisation amplifies it.
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
    """A normalisation, faded in by a learned scale that is initialised to zero."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.scale) * (self.norm(x) - x)
        return out
