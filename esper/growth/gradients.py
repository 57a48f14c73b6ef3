"""The gradients of a host and its seeds in one buffer, so that clipping takes a few operations."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

EPSILON = 1e-6  # added to a norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does


class FlatGradients:
    """Moves the present gradients into one buffer; later backward passes add to them there.

    Parameters without a gradient are left out.

    Arguments:
        parameters: by owner
    """

    def __init__(self, parameters: Mapping[str, Sequence[nn.Parameter]]) -> None:
        present = {owner: [p for p in each if p.grad is not None] for owner, each in parameters.items()}
        sizes = [sum(p.numel() for p in each) for each in present.values()]
        first = next(iter(parameters.values()))[0]
        self._flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self._by_owner: dict[str, Tensor] = dict(zip(present, torch.split(self._flat, sizes), strict=True))
        every = [p for each in present.values() for p in each]
        ends = accumulate(p.numel() for p in every)
        for parameter, end in zip(every, ends, strict=True):
            assert parameter.grad is not None
            strides = torch.empty_like(parameter).stride()  # those of the parameter's memory format
            gradient = self._flat[end - parameter.numel() : end].as_strided(parameter.shape, strides)
            parameter.grad = gradient.copy_(parameter.grad)

    def of(self, owner: str) -> Tensor:
        """All gradients of an owner: [values]; empty if its parameters have none."""
        return self._by_owner[owner]

    def clip(self, largest: float) -> dict[str, Tensor]:
        """Scale the gradients of each owner down to a norm of at most `largest`; returns the norms before that."""
        norms = torch.stack([torch.linalg.vector_norm(values) for values in self._by_owner.values()])
        factors = (largest / (norms + EPSILON)).clamp(max=1.0).unbind()
        for values, factor in zip(self._by_owner.values(), factors, strict=True):
            values.mul_(factor)
        return dict(zip(self._by_owner, norms.unbind(), strict=True))

    def zero(self) -> None:
        self._flat.zero_()
