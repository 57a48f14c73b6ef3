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


def randomise_zero_layers(module: nn.Module) -> None:
    """Give layers with a weight matrix of zeros, such as the last one of `Residual`, the initial weights of torch.

    Their biases too. The scale of `FadedNorm` is no matrix and stays zero, and so do parameters outside of a layer that
    has `reset_parameters`.
    """
    for layer in module.modules():
        matrices = [parameter for parameter in layer.parameters(recurse=False) if parameter.ndim > 1]
        initialise = getattr(layer, "reset_parameters", None)
        if callable(initialise) and any(not matrix.is_meta and not matrix.any() for matrix in matrices):
            initialise()


class FadedNorm(nn.Module):
    """A normalisation, faded in by a learned scale that is initialised to zero."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.scale) * (self.norm(x) - x)
        return out
