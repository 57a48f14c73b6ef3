"""Cost of layers, in FLOPs per sample.

A multiply-add counts as two FLOPs, as in torch's FlopCounterMode. Element-wise operations, normalisations and
embeddings count as zero.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """FLOPs of one sample: the forward pass and the two gradients of the backward pass."""

    forward: int = 0
    input_grad: int = 0  # gradient of the input, which earlier layers need
    weight_grad: int = 0  # gradient of the weights, not computed where they are frozen

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad
        )

    @property
    def frozen(self) -> int:
        """Forward and backward pass with frozen weights."""
        return self.forward + self.input_grad

    @property
    def total(self) -> int:
        """Forward and backward pass."""
        return self.forward + self.input_grad + self.weight_grad


def symmetric_flops(flops: int) -> Flops:
    """Each gradient costs as much as the forward pass, as for every product of inputs and weights."""
    return Flops(flops, flops, flops)


def linear_flops(inputs: int, outputs: int, positions: int = 1) -> Flops:
    """A linear layer, applied at each of `positions`."""
    return symmetric_flops(2 * inputs * outputs * positions)


def conv_flops(inputs: int, outputs: int, kernel: int, positions: int, groups: int = 1) -> Flops:
    """A convolution with a square kernel; `positions` is the number of output pixels.

    FlopCounterMode ignores the groups in the weight gradient and so counts `groups` times too many FLOPs; here the
    weight gradient costs as much as the forward pass.
    """
    return symmetric_flops(2 * (inputs // groups) * outputs * kernel**2 * positions)


def attention_flops(channels: int, positions: int) -> Flops:
    """Scaled dot-product attention without its projections: two matrix products forward and five backward, because
    fused kernels recompute the scores. A causal mask saves nothing, as in FlopCounterMode.
    """
    product = 2 * positions**2 * channels
    return Flops(forward=2 * product, input_grad=5 * product)
