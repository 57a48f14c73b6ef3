"""The learned policy as a controller: it samples, or takes what is likeliest."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.controllers.policy import LSTMState, Policy, noise_width
from esper.observation import PolicyInputs
from esper.rng import make_generator


@dataclass(frozen=True)
class PolicyMemory:
    """What the policy remembers between steps, and each episode's own source of chance."""

    state: LSTMState
    noise: list[torch.Generator]


@dataclass(frozen=True)
class PolicyDecision:
    """An action and all that an update must know of how it came about."""

    action: Tensor  # int64 [envs, heads]
    log_prob: Tensor  # [envs, heads]
    value: Tensor  # [envs], in units of the return scale
    inputs: PolicyInputs  # what was seen, where the policy is
    base: Tensor  # [envs, features], as the network saw them
    slots: Tensor  # [envs, slots, features], likewise


class PolicyController:
    """Acts by a policy.

    Arguments:
        policy: the network
        greedy: take the likeliest option of each head, without chance
    """

    def __init__(self, policy: Policy, *, greedy: bool) -> None:
        self._policy, self._greedy = policy, greedy
        self._draws = noise_width(policy.layout)
        self.flops = policy.flops

    def begin(self, episode_seeds: Sequence[int]) -> PolicyMemory:
        return PolicyMemory(
            self._policy.begin(len(episode_seeds)),
            [make_generator("action noise", episode_seed) for episode_seed in episode_seeds],
        )

    def act(self, observation: PolicyInputs, memory: PolicyMemory) -> tuple[Tensor, PolicyMemory]:
        choice, memory = self.decide(observation, memory)
        return choice.action, memory

    @torch.inference_mode()
    def decide(self, observation: PolicyInputs, memory: PolicyMemory) -> tuple[PolicyDecision, PolicyMemory]:
        """An action with its log-probabilities and the value of the state."""
        device = memory.state[0].device
        inputs = observation.to(device)
        base, slots = self._policy.normalised(inputs)
        output = self._policy(base.unsqueeze(1), slots.unsqueeze(1), inputs.blueprints.unsqueeze(1), memory.state)
        distribution = self._policy.distribution(output.logits, inputs.masks)
        if self._greedy:
            action = distribution.mode()
        else:
            noise = torch.stack([torch.empty(self._draws).exponential_(generator=draws) for draws in memory.noise])
            action = distribution.sample(noise.to(device, non_blocking=True))
        choice = PolicyDecision(action, distribution.log_prob(action), output.value.squeeze(1), inputs, base, slots)
        return choice, PolicyMemory(output.state, memory.noise)


class PermutedPolicyController:
    """A learned controller that is shown what goes on in its neighbour's episode; only what is legal is its own.

    What it loses by that is what it owes to looking.
    """

    def __init__(self, learned: PolicyController) -> None:
        self._learned = learned
        self.flops = learned.flops

    def begin(self, episode_seeds: Sequence[int]) -> PolicyMemory:
        if len(episode_seeds) < 2:
            raise ValueError("ppo_permuted: must have at least two episodes to show one what goes on in the other.")
        return self._learned.begin(episode_seeds)

    def act(self, observation: PolicyInputs, memory: PolicyMemory) -> tuple[Tensor, PolicyMemory]:
        base, slots, blueprints = (
            part.roll(1, 0) for part in (observation.base, observation.slots, observation.blueprints)
        )
        return self._learned.act(PolicyInputs(base, slots, blueprints, observation.masks), memory)
