"""What one update works with, and the loss of some of its episodes."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.controllers import Moments, Policy
from esper.lifecycle import active, available
from esper.ppo.distributed import reduce_mean, reduce_sum
from esper.ppo.gae import gae
from esper.ppo.losses import explained_variance, masked_mean, normalised, surrogate, value_loss
from esper.ppo.return_scale import ReturnScale
from esper.ppo.rollout import Rollout
from esper.ppo.settings import PPOSettings


@dataclass(frozen=True)
class UpdateTargets:
    """What the episodes of a round teach."""

    advantages: Tensor  # [envs, steps], normalised over decision steps
    returns: Tensor  # [envs, steps], of what the critic foretells, in units of the return scale
    values: Tensor  # [envs, steps], as they were when acting, in the same units
    active: Tensor  # bool [envs, steps, heads]: the head took part, and had a choice
    available: Tensor  # bool [envs, steps, heads]: under some legal op the head had a choice
    decision: Tensor  # bool [envs, steps]: some head was active
    figures: dict[str, float]


def prepare_targets(rollout: Rollout, policy: Policy, scale: ReturnScale, settings: PPOSettings) -> UpdateTargets:
    """Advantages, returns and masks; also folds the round into the statistics of observations and returns."""
    policy.fold(reduce_sum(policy.moments(rollout.raw_base, rollout.raw_slots, rollout.valid)))
    paid = (
        rollout.reward.cumsum(1) * settings.predicts_episode_return
    )  # after each step; the critic's estimates are of that and the rest
    before = paid - rollout.reward * settings.predicts_episode_return
    values, next_values = scale.unscaled(rollout.value) - before, scale.unscaled(rollout.next_value) - paid
    advantages = gae(
        rollout.reward, values, next_values, rollout.terminated, rollout.truncated,
        gamma=settings.gamma, lam=settings.lam,
    )  # fmt: skip
    returns = advantages + values
    scale.fold(reduce_sum(Moments.of((returns + before).unsqueeze(-1), rollout.valid).packed()), policy.critic)
    masks = rollout.masks.each(lambda mask: mask.flatten(0, 1))
    shape, valid = rollout.action.shape, rollout.valid.unsqueeze(-1)
    took_part = active(masks, rollout.each("op").flatten(), rollout.layout, policy.masked).view(shape) & valid
    decision = took_part.any(-1)
    parts = torch.stack([returns, returns - values, advantages, values], -1)
    every = Moments.unpacked(reduce_sum(Moments.of(parts, rollout.valid).packed()))
    chosen = Moments.unpacked(reduce_sum(Moments.of(advantages.unsqueeze(-1), decision).packed()))
    mean, std = chosen.mean[0], chosen.variance[0].sqrt()
    figures = {
        "losses/explained_variance": explained_variance(every.variance[1], every.variance[0]),
        "policy/forced": 1 - chosen.count / every.count.clamp(min=1),
        "policy/advantage_mean": mean,
        "policy/advantage_std": std,
        "policy/return_mean": every.mean[0],
        "policy/return_std": every.variance[0].sqrt(),
        "policy/value_mean": every.mean[3],
        "policy/value_std": every.variance[3].sqrt(),
    }
    found = torch.stack([figure.double() for figure in figures.values()]).tolist()
    return UpdateTargets(
        advantages=normalised(advantages, mean, std, min_std=settings.advantage_min_std).to(advantages.dtype),
        returns=scale.scaled(returns + before),
        values=scale.scaled(values + before),
        active=took_part,
        available=available(masks, rollout.layout).view(shape) & valid,
        decision=decision,
        figures=dict(zip(figures, found, strict=True)),
    )


@dataclass(frozen=True)
class StepCounts:
    """How many steps of a minibatch each mean is over; with several ranks a rank's share of all."""

    valid: Tensor  # []
    decision: Tensor  # []
    active: Tensor  # [heads]
    available: Tensor  # [heads]

    @classmethod
    def of(cls, rollout: Rollout, targets: UpdateTargets, rows: Tensor) -> "StepCounts":
        parts = [rollout.valid[rows].sum().reshape(1), targets.decision[rows].sum().reshape(1)]
        parts += [targets.active[rows].sum((0, 1)), targets.available[rows].sum((0, 1))]
        packed = reduce_mean(torch.cat(parts).float())
        took_part, could = packed[2:].chunk(2)
        return cls(packed[0], packed[1], took_part, could)


@dataclass(frozen=True)
class MinibatchMetrics:
    """Of one minibatch; pieces of it may be added up."""

    policy: Tensor  # []
    value: Tensor  # []
    kl: Tensor  # [heads], as a mean over decision steps, so that their sum is the KL of whole actions
    clipped: Tensor  # [heads], share of active ratios
    entropy: Tensor  # [heads], normalised, over the steps where the head had a choice
    largest: Tensor  # []
    smallest: Tensor  # []

    def named(self, heads: tuple[str, ...]) -> dict[str, Tensor]:
        """By the names of metrics."""
        by_head = {"kl": self.kl, "clipped": self.clipped, "entropy": self.entropy}
        return {
            "losses/policy": self.policy,
            "losses/value": self.value,
            "policy/kl": self.kl.sum(),
            "policy/ratio_max": self.largest,
            "policy/ratio_min": self.smallest,
            **{f"policy/{name}_{head}": part[i] for name, part in by_head.items() for i, head in enumerate(heads)},
        }

    def __add__(self, other: "MinibatchMetrics") -> "MinibatchMetrics":
        added = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        added["largest"] = torch.maximum(self.largest, other.largest)
        added["smallest"] = torch.minimum(self.smallest, other.smallest)
        return MinibatchMetrics(**added)


def minibatch_loss(
    policy: Policy,
    rollout: Rollout,
    targets: UpdateTargets,
    rows: Tensor,
    counts: StepCounts,
    settings: PPOSettings,
    bonus: float,
) -> tuple[Tensor, MinibatchMetrics]:
    """The loss of the episodes in `rows`, as their part of a minibatch; `bonus` is the weight of entropy.

    Sequences run again from the state they started with, so that several passes are exact.
    """
    state = (rollout.state[0][:, rows].contiguous(), rollout.state[1][:, rows].contiguous())
    output = policy(rollout.base[rows], rollout.slots[rows], rollout.blueprints[rows], state)
    masks = rollout.masks.each(lambda mask: mask[rows].flatten(0, 1))
    distribution = policy.distribution(output.logits, masks, validate=False)  # the acting policy has looked
    part = surrogate(
        distribution.log_prob(rollout.action[rows].flatten(0, 1)),
        rollout.log_prob[rows].flatten(0, 1),
        targets.advantages[rows].flatten(),
        targets.active[rows].flatten(0, 1),
        clip=settings.clip,
    )
    over = counts.active if settings.head_weighting == "active" else counts.valid
    policy_loss = masked_mean(part.loss, over).sum()
    critic = value_loss(
        output.value, targets.values[rows], targets.returns[rows], rollout.valid[rows],
        kind=settings.value_loss, bound=settings.value_bound,
    )  # fmt: skip
    critic_loss = masked_mean(critic, counts.valid)
    open_steps = targets.available[rows].flatten(0, 1)
    entropy = masked_mean((distribution.entropy() * open_steps).sum(0), counts.available)
    weights = entropy.new_tensor(
        [(settings.entropy_weights or {}).get(head, 1.0) for head in rollout.layout.head_names]
    )
    loss = policy_loss + settings.value_coef * critic_loss - bonus * (entropy * weights).sum() / len(weights)
    figures = MinibatchMetrics(
        policy=policy_loss.detach(),
        value=critic_loss.detach(),
        kl=masked_mean(part.kl, counts.decision),
        clipped=masked_mean(part.clipped.float(), counts.active),
        entropy=entropy.detach(),
        largest=part.largest,
        smallest=part.smallest,
    )
    return loss, figures
