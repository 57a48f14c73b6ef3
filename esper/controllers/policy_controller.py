"""A policy as a controller: it samples actions, or takes the most likely ones."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.controllers.policy import LSTMState, Policy, noise_width
from esper.observation import PolicyInputs
from esper.rng import make_generator


@dataclass(frozen=True)
class PolicyMemory:
    """The LSTM state between steps, and a generator of action noise for each episode."""

    state: LSTMState
    noise: list[torch.Generator]


@dataclass(frozen=True)
class PolicyDecision:
    """The actions of one step, with everything that a PPO update needs."""

    action: Tensor  # int64 [envs, heads]
    log_prob: Tensor  # [envs, heads]
    value: Tensor  # [envs], in units of the return scale
    inputs: PolicyInputs  # raw, on the policy's device
    base: Tensor  # [envs, features], normalised
    slots: Tensor  # [envs, slots, features], normalised


class PolicyController:
    """Acts with a policy.

    Arguments:
        policy: the network
        greedy: whether to take the most likely option of each head instead of sampling; None samples too
    """

    def __init__(self, policy: Policy, *, greedy: bool | None) -> None:
        self._policy, self._greedy = policy, greedy
        self._noise_width = noise_width(policy.layout)
        self.flops = policy.flops

    def begin(self, episode_seeds: Sequence[int]) -> PolicyMemory:
        return PolicyMemory(
            self._policy.begin(len(episode_seeds)),
            [make_generator("action noise", episode_seed) for episode_seed in episode_seeds],
        )

    def act(self, observation: PolicyInputs, memory: PolicyMemory) -> tuple[Tensor, PolicyMemory]:
        decision, memory = self.decide(observation, memory)
        return decision.action, memory

    @torch.inference_mode()
    def decide(self, observation: PolicyInputs, memory: PolicyMemory) -> tuple[PolicyDecision, PolicyMemory]:
        """The actions of one step, with log-probabilities and state values."""
        device = memory.state[0].device
        inputs = observation.to(device)
        base, slots = self._policy.normalised(inputs)
        output = self._policy(base.unsqueeze(1), slots.unsqueeze(1), inputs.blueprints.unsqueeze(1), memory.state)
        distribution = self._policy.distribution(output.logits, inputs.masks)
        if self._greedy:
            action = distribution.mode()
        else:
            rows = [torch.empty(self._noise_width).exponential_(generator=generator) for generator in memory.noise]
            action = distribution.sample(torch.stack(rows).to(device, non_blocking=True))
        decision = PolicyDecision(action, distribution.log_prob(action), output.value.squeeze(1), inputs, base, slots)
        return decision, PolicyMemory(output.state, memory.noise)


class PermutedPolicyController:
    """A control: a policy controller that sees the features of the next episode, with the slots and masks of its own.

    Its loss of score shows how much the policy depends on what it observes.
    """

    def __init__(self, controller: PolicyController) -> None:
        self._controller = controller
        self.flops = controller.flops

    def begin(self, episode_seeds: Sequence[int]) -> PolicyMemory:
        if len(episode_seeds) < 2:
            raise ValueError("ppo_permuted: must have at least two parallel episodes, to swap their observations.")
        return self._controller.begin(episode_seeds)

    def act(self, observation: PolicyInputs, memory: PolicyMemory) -> tuple[Tensor, PolicyMemory]:
        base, slots, blueprints = (
            part.roll(1, 0) for part in (observation.base, observation.slots, observation.blueprints)
        )
        inputs = PolicyInputs(base, slots, blueprints, observation.exists, observation.masks)
        return self._controller.act(inputs, memory)
