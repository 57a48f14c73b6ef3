"""Advantages relative to the task: a baseline from the other episodes of the task, and one scale for all tasks.

A round has several episodes of each task, and tasks differ more in their returns than actions do. So the critic learns
V, the return of an episode minus the mean return of the other episodes of its task in the round: it predicts what
happened in this episode, in the units of such differences, and not how hard the task is. For episode i at step t, with
return R, the baseline is

    b[i, t] = V[i, t] + mean over the other episodes j of the task of (R[j] - V[j, t])

- It is unbiased: V depends on what was seen before the action, and the mean on other episodes only, so b does not
  depend on the action, and E[(R - b) grad log p] is the policy gradient, however wrong the critic is.
- A constant that is added to all returns of a task, or to all values, changes no advantage.
- With K episodes, its variance is that of R - V among the episodes of the task, times 1 + 1 / (K - 1). The others'
  returns without their values would have the variance of R there. A critic that knows nothing leaves their mean.

With lambda below 1, b is the value function of generalised advantage estimation. The only episode of a task has no
others: all other episodes of the round take their place, so it is judged by the critic and the mean of the round.
"""

import torch
from torch import Tensor, nn

from esper.ppo.distributed import reduce_sum
from esper.ppo.losses import group_tasks


def leave_one_out(residuals: Tensor, learned: Tensor, tasks: Tensor) -> Tensor:
    """The mean residual of the other episodes of the task, of all ranks: [envs, steps].

    Without others in the task it is the mean of all other episodes, and 0 if there are none. After an episode's last
    learned step its last residual counts, so that every episode counts at every step.

    Arguments:
        residuals: [envs, steps], return - value
        learned: bool [envs, steps], steps with a prediction
        tasks: int64 [envs], the same number for episodes of the same task
    """
    steps = torch.arange(residuals.shape[1], device=residuals.device).expand_as(residuals)
    last = torch.where(learned, steps, 0).amax(1, keepdim=True)
    counts = learned.any(1, keepdim=True)
    filled = torch.where(counts, residuals.gather(1, torch.minimum(steps, last)).double(), 0.0)
    parts, groups = torch.cat([filled, counts.double()], 1), group_tasks(tasks)
    totals = reduce_sum(groups.T @ parts)  # of each task, with the number of episodes last
    others = totals[groups.argmax(1)] - parts
    others = torch.where(others[:, -1:] > 0, others, totals.sum(0) - parts)
    return (others[:, :-1] / others[:, -1:].clamp(min=1)).to(residuals.dtype)


def pooled_variance(advantages: Tensor, decision: Tensor, tasks: Tensor) -> Tensor:
    """The variance of advantages [envs, steps] at decision steps around the mean of their task, over all tasks.

    The advantages of a task's only episode are not centred: they have no baseline but the critic, and may be large.
    """
    values = torch.where(decision, advantages, 0.0).double()
    columns = [decision.any(1).double(), decision.double().sum(1), values.sum(1), values.square().sum(1)]
    episodes, count, total, squares = reduce_sum(group_tasks(tasks).T @ torch.stack(columns, 1)).unbind(1)
    centre = torch.where(episodes > 1, total.square() / count.clamp(min=1), 0.0)
    return (squares - centre).clamp(min=0).sum() / count.sum().clamp(min=1)


class AdvantageScale(nn.Module):
    """The standard deviation that advantages of all tasks are divided by.

    It is of the deviations within tasks, pooled over a round and shrunk towards earlier rounds. A task's own standard
    deviation is not used: a task without anything at stake would get advantages as large as any other, all noise.

    Arguments:
        shrinkage: weight of earlier rounds in the variance
    """

    variance: Tensor
    rounds: Tensor

    def __init__(self, shrinkage: float) -> None:
        super().__init__()
        self._shrinkage = shrinkage
        self.register_buffer("variance", torch.zeros((), dtype=torch.float64))
        self.register_buffer("rounds", torch.zeros((), dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        return self.variance.sqrt()

    @torch.no_grad()
    def fold(self, variance: Tensor) -> None:
        """Add the variance of a round; one that is not a finite number changes nothing."""
        is_finite, weight = variance.isfinite(), torch.where(self.rounds > 0, self._shrinkage, 0.0)
        mixed = weight * self.variance + (1 - weight) * variance
        self.variance.copy_(torch.where(is_finite, mixed, self.variance))
        self.rounds.add_(is_finite)
