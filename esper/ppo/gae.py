"""Generalised advantage estimation."""

import torch
from torch import Tensor


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a loop over steps gains nothing from being unrolled
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Tensor:
    """Advantages, one row per environment; returns are advantages + values.

    All tensors are [envs, steps]. `next_values` is V of the observation after the action, so a truncated step
    bootstraps from it and a terminated one does not; neither passes advantage on from the episode behind it.
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    carry = gamma * lam * ~(terminated | truncated)
    advantages = torch.empty_like(deltas)
    following = torch.zeros_like(deltas[:, 0])
    for step in reversed(range(deltas.shape[1])):
        following = deltas[:, step] + carry[:, step] * following
        advantages[:, step] = following
    return advantages
