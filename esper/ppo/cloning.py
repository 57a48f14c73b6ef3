"""Behaviour cloning: a policy learns to act as the controllers of recorded episodes do.

Run the controllers with `run_controller`, pass all their rollouts to `fold_observations`, then call `clone_actions`.
Each rank of a distributed run does the same before its first round, so nothing is reduced over ranks here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from esper.controllers import Controller, EpisodeContext, Policy, PolicyController, PolicyDecision
from esper.controllers.controller import Memory
from esper.lifecycle import active
from esper.observation import PolicyInputs
from esper.ppo.collector import VectorEnv
from esper.ppo.module import ADAM_EPS
from esper.ppo.rollout import Rollout
from esper.rng import make_generator


def run_controller(
    environment: VectorEnv, controller: Controller[Memory], policy: Policy, episode_seeds: Sequence[int]
) -> Rollout:
    """Run one episode for each episode seed with a controller, and store what the policy would have observed.

    Optional features and names of blueprints are missing as in training episodes of the policy. Log-probabilities and
    values are those of no policy: they are 0.
    """
    known = PolicyController(policy, greedy=None, explore=True).begin(episode_seeds)
    device = known.available.device
    rollout = Rollout.empty(list(episode_seeds), environment.steps, environment.layout, known.state)
    observation, memory = environment.reset(episode_seeds), controller.begin(episode_seeds)
    alive = torch.ones(len(episode_seeds), dtype=torch.bool)
    for step in range(environment.steps):
        action, memory = controller.act(observation, memory)  # type: ignore[arg-type]  # rules read the view, too
        inputs = observation.to(device)
        base, slots = policy.normalised(inputs, known.available)
        none = torch.zeros(action.shape, device=device)
        context = EpisodeContext(inputs.exists, inputs.candidates, known.named)
        decision = PolicyDecision(action.to(device), none, none, none[:, 0], inputs, context, base, slots)
        rollout.write_decision(step, decision, alive)
        result = environment.step(action)
        rollout.write_result(step, result.reward, result.terminated, result.truncated)
        observation = result.observation
        alive = alive & ~(result.terminated | result.truncated)
        if not alive.any():
            break
    rollout.outcome = environment.outcome()
    return rollout


def fold_observations(policy: Policy, rollouts: Sequence[Rollout]) -> None:
    """Add the observations of all rollouts to the policy's statistics, and normalise the rollouts by them."""
    policy.fold(
        sum(
            (policy.moments(each.raw_base, each.raw_slots, each.valid, each.context.exists) for each in rollouts),
            start=torch.zeros((), device=policy.base_statistics.count.device),
        )
    )
    for rollout in rollouts:
        known = PolicyController(policy, greedy=None, explore=True).begin(rollout.episode_seeds)
        exists, candidates = rollout.context.exists, rollout.context.candidates
        for step in range(rollout.valid.shape[1]):
            masks = rollout.masks.each(lambda mask, step=step: mask[:, step])  # type: ignore[misc]
            raw = (rollout.raw_base[:, step], rollout.raw_slots[:, step], rollout.blueprints[:, step])
            base, slots = policy.normalised(PolicyInputs(*raw, exists, candidates, masks), known.available)
            is_valid = rollout.valid[:, step]
            rollout.base[:, step] = torch.where(is_valid[:, None], base, 0.0)
            rollout.slots[:, step] = torch.where(is_valid[:, None, None], slots, 0.0)


def clone_actions(
    policy: Policy,
    rollouts: Sequence[Rollout],
    weights: Sequence[Tensor],
    *,
    passes: int,
    minibatch: int,
    lr: float,
    grad_clip: float,
    rng_seed: int,
) -> list[float]:
    """Train a policy to choose the recorded actions; returns the mean loss of each pass, before its steps.

    The loss is the negative log-likelihood of an action, summed over its active heads and averaged over all decisions,
    each weighted by its episode. Steps without a choice are left out. The critic does not change.

    Arguments:
        policy: the network that is trained
        rollouts: recorded episodes, normalised by the policy's statistics
        weights: of the episodes of each rollout, [envs] each, at least 0
        passes: over all episodes
        minibatch: maximum number of episodes of an optimizer step; all are of one rollout
        lr: learning rate
        grad_clip: maximum gradient norm
        rng_seed: the order of episodes is derived from it
    """
    for name, number in (("passes", passes), ("minibatch", minibatch)):
        if number < 1:
            raise ValueError(f"{name}={number}: must be at least 1.")
    if [len(each) for each in weights] != [len(rollout.episode_seeds) for rollout in rollouts]:
        raise ValueError("weights: must have one number for each episode of each rollout.")
    if not all(bool((each >= 0).all() and each.isfinite().all()) for each in weights):
        raise ValueError("weights: must be finite numbers of at least 0.")
    device = policy.base_statistics.count.device
    used = [weight.to(device, torch.float32) for weight in weights]
    masks = [_active_heads(policy, rollout) for rollout in rollouts]
    pairs = zip(used, masks, strict=True)
    total = sum((weight * mask.any(-1).sum(1)).sum().item() for weight, mask in pairs)
    if not total:
        raise ValueError("weights: must be above 0 for an episode with a decision.")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, eps=ADAM_EPS, weight_decay=0.0)
    generator, losses = make_generator("cloning", rng_seed), []
    for _ in range(passes):
        chunks = [
            (index, rows.to(device))
            for index, rollout in enumerate(rollouts)
            for rows in torch.split(torch.randperm(len(rollout.episode_seeds), generator=generator), minibatch)
        ]
        losses.append(0.0)
        for position in torch.randperm(len(chunks), generator=generator).tolist():
            index, rows = chunks[position]
            log_prob = _log_prob(policy, rollouts[index], rows) * masks[index][rows]
            loss = -(used[index][rows] * log_prob.sum((1, 2))).sum() / total
            losses[-1] += loss.item()
            optimizer.zero_grad(set_to_none=True)
            (loss * len(chunks)).backward()  # the same step size for any number of chunks
            clip_grad_norm_(policy.parameters(), grad_clip)
            optimizer.step()
    return losses


def _active_heads(policy: Policy, rollout: Rollout) -> Tensor:
    """Heads that an action used with at least two legal options: bool [envs, steps, heads]."""
    masks = rollout.masks.each(lambda mask: mask.flatten(0, 1))
    is_active = active(masks, rollout.select_head("op").flatten(), rollout.layout, policy.masked)
    return is_active.view(rollout.action.shape) & rollout.valid.unsqueeze(-1)


def _log_prob(policy: Policy, rollout: Rollout, rows: Tensor) -> Tensor:
    """Log-probabilities [rows, steps, heads] of the actions of some episodes."""
    state = (rollout.state[0][:, rows].contiguous(), rollout.state[1][:, rows].contiguous())
    output = policy(rollout.base[rows], rollout.slots[rows], rollout.blueprints[rows], state, rollout.context[rows])
    masks, action = rollout.masks.each(lambda mask: mask[rows].flatten(0, 1)), rollout.action[rows]
    log_prob = policy.distribution(output.logits, masks, validate=False).log_prob(action.flatten(0, 1))
    return log_prob.view(action.shape)
