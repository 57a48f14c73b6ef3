"""Gradients: those of a host and its seeds in one buffer, so that clipping takes a few operations, and their health."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

VANISHING, EXPLODING = 1e-7, 10.0  # gradient norms of one parameter tensor, in multiples of the clip norm
EPSILON = 1e-6  # added to a norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does


class FlatGradients:
    """Moves the present gradients into one buffer for each dtype; later backward passes add to them there.

    Parameters without a gradient are left out.

    Arguments:
        parameters: by owner
    """

    def __init__(self, parameters: Mapping[str, Sequence[nn.Parameter]]) -> None:
        self._without = [p for each in parameters.values() for p in each if p.grad is None]
        self._by_owner: dict[str, list[Tensor]] = {owner: [] for owner in parameters}
        self._buffers: list[Tensor] = []
        self._zero = torch.zeros((), device=next(iter(parameters.values()))[0].device)
        by_dtype: dict[torch.dtype, dict[str, list[nn.Parameter]]] = defaultdict(lambda: defaultdict(list))
        for owner, each in parameters.items():
            for parameter in each:
                if parameter.grad is not None:
                    by_dtype[parameter.dtype][owner].append(parameter)
        for present in by_dtype.values():
            self._add_buffer(present)

    def _add_buffer(self, present: Mapping[str, Sequence[nn.Parameter]]) -> None:
        sizes = [sum(parameter.numel() for parameter in each) for each in present.values()]
        first = next(iter(present.values()))[0]
        buffer = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self._buffers.append(buffer)
        for values, (owner, each) in zip(torch.split(buffer, sizes), present.items(), strict=True):
            self._by_owner[owner].append(values)
            end = 0
            for parameter in each:
                start, end = end, end + parameter.numel()
                strides = torch.empty_like(parameter).stride()  # those of the parameter's memory format
                gradient = values[start:end].as_strided(parameter.shape, strides)
                assert parameter.grad is not None
                parameter.grad = gradient.copy_(parameter.grad)

    @property
    def is_complete(self) -> bool:
        """Whether all present gradients are in the buffer."""
        return all(parameter.grad is None for parameter in self._without)

    def of(self, owner: str) -> list[Tensor]:
        """All gradients of an owner: [values] for each dtype."""
        return self._by_owner[owner]

    def clip(self, largest: float) -> dict[str, Tensor]:
        """Scale the gradients of each owner down to a norm of at most `largest`; returns the norms before that."""
        norms = torch.stack([self._norm(values) for values in self._by_owner.values()])
        factors = (largest / (norms + EPSILON)).clamp(max=1.0).unbind()
        for each, factor in zip(self._by_owner.values(), factors, strict=True):
            for values in each:
                values.mul_(factor)
        return dict(zip(self._by_owner, norms.unbind(), strict=True))

    def zero(self) -> None:
        for buffer in self._buffers:
            buffer.zero_()

    def _norm(self, values: Sequence[Tensor]) -> Tensor:
        """The norm over all dtypes; 0 without gradients."""
        norms: list[Tensor] = [torch.linalg.vector_norm(each).float() for each in values]
        if len(norms) < 2:
            return norms[0] if norms else self._zero
        joint: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return joint


def gradient_health(parameters: Sequence[nn.Parameter], clip: float) -> Tensor:
    """1 - 0.5 x the share of vanishing - 0.8 x the share of exploding gradients; 0 with non-finite values.

    The thresholds are multiples of the clip norm. Parameters without a gradient do not count; NaN if none has one.
    Reads no value from the device.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.full((), torch.nan, device=parameters[0].device)
    unit = clip if math.isfinite(clip) else 1.0
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).float()
    health = 1 - 0.5 * (norms < VANISHING * unit).float().mean() - 0.8 * (norms > EXPLODING * unit).float().mean()
    return torch.where(norms.isfinite().all(), health, torch.zeros_like(health))
