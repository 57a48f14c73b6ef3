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
    lam: float | Tensor,
) -> Tensor:
    """Advantages, one row per environment; returns are advantages + values.

    All tensors are [envs, steps]. `next_values` is V of the observation after the action, so a truncated step
    bootstraps from it and a terminated one does not; advantages of later steps in the row do not pass either. `lam` may
    differ between steps.
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    carry = gamma * lam * ~(terminated | truncated)
    advantages = torch.empty_like(deltas)
    advantage = torch.zeros_like(deltas[:, 0])
    for step in reversed(range(deltas.shape[1])):
        advantage = deltas[:, step] + carry[:, step] * advantage
        advantages[:, step] = advantage
    return advantages


@torch.compiler.disable  # type: ignore[untyped-decorator]
def skip_steps(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    skipped: Tensor,
    *,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """Values and next values that let `gae` pass over the `skipped` steps, if its `lam` is 1 there.

    All tensors are [envs, steps]. The value of a skipped step is its reward plus the value after it, so its own
    prediction is not used, and a step before skipped ones lasts until the next step that is not skipped. The advantage
    of a skipped step is the discounted advantage of that next step, 0 if there is none.
    """
    values, next_values, ends = values.clone(), next_values.clone(), terminated | truncated
    for step in reversed(range(rewards.shape[1])):
        if step + 1 < rewards.shape[1]:
            passes = skipped[:, step + 1] & ~ends[:, step]
            next_values[:, step] = torch.where(passes, values[:, step + 1], next_values[:, step])
        after = rewards[:, step] + gamma * next_values[:, step] * ~terminated[:, step]
        values[:, step] = torch.where(skipped[:, step], after, values[:, step])
    return values, next_values
