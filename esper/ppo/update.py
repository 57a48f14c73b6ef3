"""The targets of one update, and the loss of a minibatch."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.controllers import Moments, Policy
from esper.lifecycle import active, available
from esper.ppo.baseline import AdvantageScale, leave_one_out, pooled_variance
from esper.ppo.critic import Critic
from esper.ppo.distributed import reduce_mean, reduce_sum
from esper.ppo.gae import gae, skip_steps
from esper.ppo.losses import explained_variance, masked_mean, normalise, surrogate, value_loss
from esper.ppo.return_scale import ReturnScale
from esper.ppo.rollout import Rollout
from esper.ppo.settings import PPOSettings


@dataclass(frozen=True)
class UpdateTargets:
    """What an update learns from a round."""

    advantages: Tensor  # [envs, steps], normalised over decision steps, or over tasks for leave_one_out
    returns: Tensor  # [envs, steps], targets of the critic, in units of the return scale
    values: Tensor  # [envs, steps], of the acting policy, in the same units
    active: Tensor  # bool [envs, steps, heads]: the chosen op uses the head, and it had several legal options
    available: Tensor  # bool [envs, steps, heads]: the same for some legal op
    decision: Tensor  # bool [envs, steps]: some head is active
    learned: Tensor  # bool [envs, steps]: valid steps, without forced ones if these are skipped
    metrics: dict[str, float]


def prepare_targets(
    rollout: Rollout,
    policy: Policy,
    scale: ReturnScale,
    settings: PPOSettings,
    critic: Critic | None = None,
    advantage_scale: AdvantageScale | None = None,
) -> UpdateTargets:
    """Compute advantages, returns and masks; also add the round to the statistics of observations and returns.

    `critic` is a separate one, whose values are written into the rollout; `advantage_scale` is of `leave_one_out`.
    """
    moments = policy.moments(rollout.raw_base, rollout.raw_slots, rollout.valid, rollout.context.exists)
    policy.fold(reduce_sum(moments))
    if critic is not None:
        critic.fold_tasks(rollout)
        rollout.value, rollout.next_value = critic.predict(rollout)
    masks = rollout.masks.each(lambda mask: mask.flatten(0, 1))
    shape, valid = rollout.action.shape, rollout.valid.unsqueeze(-1)
    is_active = active(masks, rollout.select_head("op").flatten(), rollout.layout, policy.masked).view(shape) & valid
    decision = is_active.any(-1)
    learned = decision if settings.skip_forced else rollout.valid
    # A critic of whole episodes predicts the reward collected so far plus the rest; only the rest is uncertain.
    collected = rollout.reward.cumsum(1) * settings.predicts_episode_return  # after each step
    before = collected - rollout.reward * settings.predicts_episode_return  # before each step
    values, next_values = scale.denormalise(rollout.value) - before, scale.denormalise(rollout.next_value) - collected
    estimates = estimate_advantages(rollout, values, next_values, learned, settings)
    advantages, returns = estimates.advantages, estimates.returns
    head = policy.critic if critic is None else critic.head
    assert head is not None
    predicted = returns + before - estimates.level
    scale.fold(reduce_sum(Moments.of(predicted.unsqueeze(-1), learned).packed()), head)
    parts = torch.stack([returns, values + estimates.shift], -1)
    overall = Moments.unpacked(reduce_sum(Moments.of(parts, learned).packed()))
    chosen = Moments.unpacked(reduce_sum(Moments.of(advantages.unsqueeze(-1), decision).packed()))
    mean, std = chosen.mean[0], chosen.variance[0].sqrt()
    metrics = {
        "losses/explained_variance": explained_variance(
            values, estimates.residuals + values, rollout.reward.cumsum(1) - rollout.reward, learned, rollout.tasks
        ),
        "policy/forced": 1 - chosen.count / reduce_sum(rollout.valid.sum().double()).clamp(min=1),
        "policy/advantage_mean": mean,
        "policy/advantage_std": std,
        "policy/return_mean": overall.mean[0],
        "policy/return_std": overall.variance[0].sqrt(),
        "policy/value_mean": overall.mean[1],
        "policy/value_std": overall.variance[1].sqrt(),
    }
    if advantage_scale is not None:
        advantage_scale.fold(pooled_variance(advantages, decision, rollout.tasks))
        mean, std = torch.zeros_like(mean), advantage_scale.std
        metrics["policy/advantage_scale"] = std
    values_on_cpu = torch.stack([metric.double() for metric in metrics.values()]).tolist()
    return UpdateTargets(
        advantages=normalise(advantages, mean, std, min_std=settings.advantage_min_std).to(advantages.dtype),
        returns=scale.normalise(predicted),
        values=scale.normalise(values + before),
        active=is_active,
        available=available(masks, rollout.layout).view(shape) & valid,
        decision=decision,
        learned=learned,
        metrics=dict(zip(metrics, values_on_cpu, strict=True)),
    )


@dataclass(frozen=True)
class AdvantageEstimates:
    """Advantages of a round, in units of reward: tensors [envs, steps]."""

    advantages: Tensor  # before normalisation
    returns: Tensor  # of the rest of the episode
    residuals: Tensor  # return - value, with the rewards of all later steps and not the critic's own values
    shift: Tensor  # what the baseline adds to the critic's values
    level: Tensor  # [envs, 1], mean return of the other episodes of the task, which the critic does not predict


def estimate_advantages(
    rollout: Rollout, values: Tensor, next_values: Tensor, learned: Tensor, settings: PPOSettings
) -> AdvantageEstimates:
    """Advantages over the baseline of the settings; `values` and `next_values` [envs, steps] are of the rest."""
    skipped = rollout.valid & ~learned
    ends = (rollout.terminated, rollout.truncated)

    def estimate(values: Tensor, next_values: Tensor, lam: float) -> tuple[Tensor, Tensor]:
        """Advantages and returns."""
        by_step: float | Tensor = lam
        if settings.skip_forced:
            values, next_values = skip_steps(rollout.reward, values, next_values, *ends, skipped, gamma=settings.gamma)
            by_step = torch.where(skipped, 1.0, lam)
        advantages = gae(rollout.reward, values, next_values, *ends, gamma=settings.gamma, lam=by_step)
        return advantages, advantages + values

    residuals, _ = estimate(values, next_values, 1.0)
    shift, level = torch.zeros_like(values), torch.zeros_like(values[:, :1])
    if settings.baseline == "leave_one_out":
        rewards = rollout.reward + torch.where(rollout.truncated, next_values, 0.0)
        level = leave_one_out(rewards.sum(1, keepdim=True), learned.any(1, keepdim=True), rollout.tasks)
        shift = leave_one_out(residuals, learned, rollout.tasks)
        later = torch.cat([shift[:, 1:], torch.zeros_like(shift[:, :1])], 1)
        values, next_values = values + shift, next_values + torch.where(ends[0] | ends[1], 0.0, later)
    advantages, returns = estimate(values, next_values, settings.lam)
    return AdvantageEstimates(advantages, returns, residuals, shift, level)


@dataclass(frozen=True)
class StepCounts:
    """The number of steps that each mean of a minibatch is over; the mean over ranks if there are several."""

    learned: Tensor  # []
    decision: Tensor  # []
    active: Tensor  # [heads]
    available: Tensor  # [heads]

    @classmethod
    def of(cls, targets: UpdateTargets, rows: Tensor) -> "StepCounts":
        parts = [targets.learned[rows].sum().reshape(1), targets.decision[rows].sum().reshape(1)]
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
    head_counts = counts.active if settings.head_weighting == "active" else counts.learned
    policy_loss = masked_mean(actor.loss, head_counts).sum()
    critic_loss = torch.zeros_like(policy_loss)
    if policy.critic is not None:
        critic_loss = critic_minibatch_loss(output.value, targets, rows, counts, settings)
    by_step = distribution.entropy()
    entropy = masked_mean((by_step * targets.available[rows].flatten(0, 1)).sum(0), counts.available)
    bonus = entropy
    if settings.entropy_weighting == "joint":
        bonus = masked_mean((by_step * targets.active[rows].flatten(0, 1)).sum(0), counts.learned)
    weights = entropy.new_tensor(
        [(settings.entropy_weights or {}).get(head, 1.0) for head in rollout.layout.head_names]
    )
    loss = policy_loss + settings.value_coef * critic_loss - entropy_bonus * (bonus * weights).sum() / len(weights)
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


def critic_minibatch_loss(
    values: Tensor, targets: UpdateTargets, rows: Tensor, counts: StepCounts, settings: PPOSettings
) -> Tensor:
    """The critic's loss of the episodes in `rows`, given their values [rows, steps]."""
    total = value_loss(
        values, targets.values[rows], targets.returns[rows], targets.learned[rows],
        kind=settings.value_loss, bound=settings.value_bound,
    )  # fmt: skip
    return masked_mean(total, counts.learned)
