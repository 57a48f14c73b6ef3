"""The two shapes that most seeds share. Both are exactly the identity at birth, and alive."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Residual(nn.Module):
    """x + branch(x), where the branch's last layer starts at zero.

    Nothing stands behind that layer, so its gradient is neither blocked by a non-linearity nor amplified by a
    normalisation. With `recompute`, the branch is run again in backward instead of keeping its activations.
    """

    def __init__(self, *branch: nn.Module, recompute: bool = False) -> None:
        super().__init__()
        self.branch = nn.Sequential(*branch)
        self.recompute = recompute
        for parameter in branch[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            change: Tensor = checkpoint(self.branch, x, use_reentrant=False)
        else:
            change = self.branch(x)
        return x + change


class FadedNorm(nn.Module):
    """A normalisation, faded in by a learned scale that starts at zero."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.scale) * (self.norm(x) - x)
        return out
