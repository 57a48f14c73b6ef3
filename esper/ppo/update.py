"""The targets of one update, and the loss of a minibatch."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.controllers import Moments, Policy
from esper.lifecycle import active, available
from esper.ppo.distributed import reduce_mean, reduce_sum
from esper.ppo.gae import gae
from esper.ppo.losses import explained_variance, masked_mean, normalise, surrogate, value_loss
from esper.ppo.return_scale import ReturnScale
from esper.ppo.rollout import Rollout
from esper.ppo.settings import PPOSettings


@dataclass(frozen=True)
class UpdateTargets:
    """What an update learns from a round."""

    advantages: Tensor  # [envs, steps], normalised over decision steps
    returns: Tensor  # [envs, steps], targets of the critic, in units of the return scale
    values: Tensor  # [envs, steps], of the acting policy, in the same units
    active: Tensor  # bool [envs, steps, heads]: the chosen op uses the head, and it had several legal options
    available: Tensor  # bool [envs, steps, heads]: the same for some legal op
    decision: Tensor  # bool [envs, steps]: some head is active
    metrics: dict[str, float]


def prepare_targets(rollout: Rollout, policy: Policy, scale: ReturnScale, settings: PPOSettings) -> UpdateTargets:
    """Compute advantages, returns and masks; also add the round to the statistics of observations and returns."""
    moments = policy.moments(rollout.raw_base, rollout.raw_slots, rollout.valid, rollout.context.exists)
    policy.fold(reduce_sum(moments))
    # A critic of whole episodes predicts the reward collected so far plus the rest; only the rest is uncertain.
    collected = rollout.reward.cumsum(1) * settings.predicts_episode_return  # after each step
    before = collected - rollout.reward * settings.predicts_episode_return  # before each step
    values, next_values = scale.denormalise(rollout.value) - before, scale.denormalise(rollout.next_value) - collected
    advantages = gae(
        rollout.reward, values, next_values, rollout.terminated, rollout.truncated,
        gamma=settings.gamma, lam=settings.lam,
    )  # fmt: skip
    returns = advantages + values
    whole = gae(
        rollout.reward, values, next_values, rollout.terminated, rollout.truncated, gamma=settings.gamma, lam=1.0
    )  # with the rewards of all later steps, not the critic's own values
    scale.fold(reduce_sum(Moments.of((returns + before).unsqueeze(-1), rollout.valid).packed()), policy.critic)
    masks = rollout.masks.each(lambda mask: mask.flatten(0, 1))
    shape, valid = rollout.action.shape, rollout.valid.unsqueeze(-1)
    is_active = active(masks, rollout.select_head("op").flatten(), rollout.layout, policy.masked).view(shape) & valid
    decision = is_active.any(-1)
    parts = torch.stack([returns, values], -1)
    overall = Moments.unpacked(reduce_sum(Moments.of(parts, rollout.valid).packed()))
    chosen = Moments.unpacked(reduce_sum(Moments.of(advantages.unsqueeze(-1), decision).packed()))
    mean, std = chosen.mean[0], chosen.variance[0].sqrt()
    metrics = {
        "losses/explained_variance": explained_variance(
            values, whole + values, rollout.reward.cumsum(1) - rollout.reward, rollout.valid, rollout.tasks
        ),
        "policy/forced": 1 - chosen.count / overall.count.clamp(min=1),
        "policy/advantage_mean": mean,
        "policy/advantage_std": std,
        "policy/return_mean": overall.mean[0],
        "policy/return_std": overall.variance[0].sqrt(),
        "policy/value_mean": overall.mean[1],
        "policy/value_std": overall.variance[1].sqrt(),
    }
    values_on_cpu = torch.stack([metric.double() for metric in metrics.values()]).tolist()
    return UpdateTargets(
        advantages=normalise(advantages, mean, std, min_std=settings.advantage_min_std).to(advantages.dtype),
        returns=scale.normalise(returns + before),
        values=scale.normalise(values + before),
        active=is_active,
        available=available(masks, rollout.layout).view(shape) & valid,
        decision=decision,
        metrics=dict(zip(metrics, values_on_cpu, strict=True)),
    )


@dataclass(frozen=True)
class StepCounts:
    """The number of steps that each mean of a minibatch is over; the mean over ranks if there are several."""

    valid: Tensor  # []
    decision: Tensor  # []
    active: Tensor  # [heads]
    available: Tensor  # [heads]

    @classmethod
    def of(cls, rollout: Rollout, targets: UpdateTargets, rows: Tensor) -> "StepCounts":
        parts = [rollout.valid[rows].sum().reshape(1), targets.decision[rows].sum().reshape(1)]
        parts += [targets.active[rows].sum((0, 1)), targets.available[rows].sum((0, 1))]
        packed = reduce_mean(torch.cat(parts).float())
        is_active, is_available = packed[2:].chunk(2)
        return cls(packed[0], packed[1], is_active, is_available)


@dataclass(frozen=True)
class MinibatchMetrics:
    """Metrics of one minibatch; those of its chunks can be added."""

    policy: Tensor  # []
    value: Tensor  # []
    kl: Tensor  # [heads], mean over decision steps, so that the sum over heads is the KL of whole actions
    clipped: Tensor  # [heads], share of the ratios of active steps
    entropy: Tensor  # [heads], normalised, mean over available steps
    ratio_max: Tensor  # []
    ratio_min: Tensor  # []

    def to_dict(self, heads: tuple[str, ...]) -> dict[str, Tensor]:
        """By metric name."""
        by_head = {"kl": self.kl, "clipped": self.clipped, "entropy": self.entropy}
        return {
            "losses/policy": self.policy,
            "losses/value": self.value,
            "policy/kl": self.kl.sum(),
            "policy/ratio_max": self.ratio_max,
            "policy/ratio_min": self.ratio_min,
            **{f"policy/{name}_{head}": part[i] for name, part in by_head.items() for i, head in enumerate(heads)},
        }

    def __add__(self, other: "MinibatchMetrics") -> "MinibatchMetrics":
        total = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        total["ratio_max"] = torch.maximum(self.ratio_max, other.ratio_max)
        total["ratio_min"] = torch.minimum(self.ratio_min, other.ratio_min)
        return MinibatchMetrics(**total)


def minibatch_loss(
    policy: Policy,
    rollout: Rollout,
    targets: UpdateTargets,
    rows: Tensor,
    counts: StepCounts,
    settings: PPOSettings,
    entropy_bonus: float,
) -> tuple[Tensor, MinibatchMetrics]:
    """The loss of the episodes in `rows`: one chunk of the minibatch whose steps `counts` has.

    `entropy_bonus` is the weight of entropy. Sequences run again from their initial state, so several passes are exact.
    """
    state = (rollout.state[0][:, rows].contiguous(), rollout.state[1][:, rows].contiguous())
    output = policy(rollout.base[rows], rollout.slots[rows], rollout.blueprints[rows], state, rollout.context[rows])
    masks = rollout.masks.each(lambda mask: mask[rows].flatten(0, 1))
    distribution = policy.distribution(output.logits, masks, validate=False)  # acting has validated them
    actor = surrogate(
        distribution.log_prob(rollout.action[rows].flatten(0, 1)),
        rollout.log_prob[rows].flatten(0, 1),
        rollout.behaviour[rows].flatten(0, 1),
        targets.advantages[rows].flatten(),
        targets.active[rows].flatten(0, 1),
        clip=settings.clip,
    )
    head_counts = counts.active if settings.head_weighting == "active" else counts.valid
    policy_loss = masked_mean(actor.loss, head_counts).sum()
    critic = value_loss(
        output.value, targets.values[rows], targets.returns[rows], rollout.valid[rows],
        kind=settings.value_loss, bound=settings.value_bound,
    )  # fmt: skip
    critic_loss = masked_mean(critic, counts.valid)
    is_available = targets.available[rows].flatten(0, 1)
    entropy = masked_mean((distribution.entropy() * is_available).sum(0), counts.available)
    weights = entropy.new_tensor(
        [(settings.entropy_weights or {}).get(head, 1.0) for head in rollout.layout.head_names]
    )
    loss = policy_loss + settings.value_coef * critic_loss - entropy_bonus * (entropy * weights).sum() / len(weights)
    metrics = MinibatchMetrics(
        policy=policy_loss.detach(),
        value=critic_loss.detach(),
        kl=masked_mean(actor.kl, counts.decision),
        clipped=masked_mean(actor.clipped.float(), counts.active),
        entropy=entropy.detach(),
        ratio_max=actor.ratio_max,
        ratio_min=actor.ratio_min,
    )
    return loss, metrics
