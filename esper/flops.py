"""What the parts of a network cost, in FLOPs per sample.

Products count two for each multiplication and its addition, as in torch's FlopCounterMode; what is done element by
element, normalisations and embeddings count nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """FLOPs of one sample, forward and for the two gradients of the backward pass."""

    forward: int = 0
    input_grad: int = 0  # the gradient towards what comes in, which passes through to the layers before
    weight_grad: int = 0  # the gradient towards the weights, which falls away where they are held fixed

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad
        )

    @property
    def frozen(self) -> int:
        """Forward and backward where no weight is trained."""
        return self.forward + self.input_grad

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.input_grad + self.weight_grad


def symmetric_flops(flops: int) -> Flops:
    """Each gradient costs as much as the forward pass, as it does for every product of inputs and weights."""
    return Flops(flops, flops, flops)


def linear_flops(inputs: int, outputs: int, positions: int = 1) -> Flops:
    """A linear layer, applied at so many positions."""
    return symmetric_flops(2 * inputs * outputs * positions)


def conv_flops(inputs: int, outputs: int, kernel: int, positions: int, groups: int = 1) -> Flops:
    """A convolution with a square kernel; `positions` are the pixels it gives.

    FlopCounterMode takes the weights' gradient of a grouped convolution for that of one without groups, so that it
    counts it so many times; here it costs what the forward pass does.
    """
    return symmetric_flops(2 * (inputs // groups) * outputs * kernel**2 * positions)


def attention_flops(channels: int, positions: int) -> Flops:
    """The part of attention that has no weights: two products forward, and five backward, for fused kernels keep no
    scores and make them anew. Causality saves nothing, as in FlopCounterMode.
    """
    product = 2 * positions**2 * channels
    return Flops(forward=2 * product, input_grad=5 * product)
