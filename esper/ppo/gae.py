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
    bootstraps from it and a terminated one does not; advantages of later steps in the row do not pass either.
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    carry = gamma * lam * ~(terminated | truncated)
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(deltas[:, 0])
    for step in reversed(range(deltas.shape[1])):
        advantage = deltas[:, step] + carry[:, step] * advantage
        advantages[:, step] = advantage
    return advantages
