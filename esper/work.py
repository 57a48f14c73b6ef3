"""What the parts of a network cost, in FLOPs per sample.

Products count two for each multiplication and its addition, as in torch's FlopCounterMode; what is done element by
element, normalisations and embeddings count nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """FLOPs of one sample, forward and for the two gradients of the backward pass."""

    forward: int = 0
    inputs: int = 0  # the gradient towards what comes in, which passes through to the layers before
    weights: int = 0  # the gradient towards the weights, which falls away where they are held fixed

    def __add__(self, other: "Work") -> "Work":
        return Work(self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights)

    @property
    def fixed(self) -> int:
        """Forward and backward where no weight is trained."""
        return self.forward + self.inputs

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.inputs + self.weights


def alike(flops: int) -> Work:
    """Each gradient costs as much as the forward pass, as it does for every product of inputs and weights."""
    return Work(flops, flops, flops)


def linear(inputs: int, outputs: int, positions: int = 1) -> Work:
    """A linear layer, applied at so many positions."""
    return alike(2 * inputs * outputs * positions)


def convolution(inputs: int, outputs: int, kernel: int, positions: int, groups: int = 1) -> Work:
    """A convolution with a square kernel; `positions` are the pixels it gives.

    FlopCounterMode takes the weights' gradient of a grouped convolution for that of one without groups, so that it
    counts it so many times; here it costs what the forward pass does.
    """
    return alike(2 * (inputs // groups) * outputs * kernel**2 * positions)


def scaled_dot_product(channels: int, positions: int) -> Work:
    """The part of attention that has no weights: two products forward, and five backward, for fused kernels keep no
    scores and make them anew. Causality saves nothing, as in FlopCounterMode.
    """
    product = 2 * positions**2 * channels
    return Work(forward=2 * product, inputs=5 * product)
