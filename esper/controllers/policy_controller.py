"""A policy as a controller: it samples actions, or takes the most likely ones."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.controllers.distribution import FactoredDistribution, noise_width
from esper.controllers.policy import EpisodeContext, LSTMState, Policy
from esper.lifecycle import Layout
from esper.observation import PolicyInputs
from esper.rng import make_generator


@dataclass(frozen=True)
class PolicyMemory:
    """The LSTM state between steps, a generator of action noise for each episode, and what the policy may see."""

    state: LSTMState
    noise: list[torch.Generator]
    available: Tensor  # bool [envs, groups], whether an optional group of features is known
    named: Tensor  # bool [envs, blueprints], whether the name of a blueprint is known


@dataclass(frozen=True)
class PolicyDecision:
    """The actions of one step, with everything that a PPO update needs."""

    action: Tensor  # int64 [envs, heads]
    log_prob: Tensor  # [envs, heads], of the policy
    behaviour: Tensor  # [envs, heads], log-probabilities of the distribution that was sampled, floors included
    value: Tensor  # [envs], in units of the return scale
    inputs: PolicyInputs  # raw, on the policy's device
    context: EpisodeContext
    base: Tensor  # [envs, inputs], normalised
    slots: Tensor  # [envs, slots, features], normalised
    distribution: FactoredDistribution | None = None  # of the policy; None if it did not decide


class PolicyController:
    """Acts with a policy.

    Arguments:
        policy: the network
        greedy: whether to take the most likely option of each head instead of sampling; None samples too
        explore: whether these are training episodes: floors are mixed into the distribution, and optional features and
            names of blueprints are missing in some of them
        missing: optional groups of features that the environment cannot provide
    """

    def __init__(
        self, policy: Policy, *, greedy: bool | None, explore: bool = False, missing: Collection[str] = ()
    ) -> None:
        self._policy, self._greedy, self._explore = policy, greedy, explore
        self._provided = torch.tensor([group not in missing for group in policy.layout.groups], dtype=torch.bool)
        self.flops = policy.flops
        self.blueprint_count = len(policy.layout.blueprints)

    @property
    def feature_means(self) -> tuple[Tensor, Tensor]:
        """Of the features of the host and of a slot, over the policy's training."""
        return self._policy.base_statistics.mean, self._policy.slot_statistics.mean

    def begin(self, episode_seeds: Sequence[int]) -> PolicyMemory:
        policy, layout = self._policy, self._policy.layout
        state = policy.begin(len(episode_seeds))
        noise = [make_generator("action noise", episode_seed) for episode_seed in episode_seeds]
        widths = (len(layout.groups), len(layout.blueprints))
        if self._explore:
            draws = torch.stack([_draw_uniform("missing inputs", seed, sum(widths)) for seed in episode_seeds])
            shares = torch.tensor([policy.group_dropout] * widths[0] + [policy.name_dropout] * widths[1])
            is_known = draws >= shares
        else:
            is_known = torch.ones(len(episode_seeds), sum(widths), dtype=torch.bool)
        is_known = is_known.to(state[0].device)
        available, named = is_known[:, : widths[0]] & self._provided.to(is_known.device), is_known[:, widths[0] :]
        return PolicyMemory(state, noise, available, named)

    @property
    def layout(self) -> Layout:
        """What the policy observes and chooses, by name."""
        return self._policy.layout

    def act(self, observation: PolicyInputs, memory: PolicyMemory) -> tuple[Tensor, PolicyMemory]:
        decision, memory = self.decide(observation, memory)
        return decision.action, memory

    def explain(self, observation: PolicyInputs, memory: PolicyMemory) -> PolicyDecision:
        """The decision with the most likely action, and the distribution; draws nothing."""
        twin = PolicyController(self._policy, greedy=True)
        return twin.decide(observation, memory)[0]

    @torch.inference_mode()
    def decide(self, observation: PolicyInputs, memory: PolicyMemory) -> tuple[PolicyDecision, PolicyMemory]:
        """The actions of one step, with log-probabilities and state values."""
        policy, device = self._policy, memory.state[0].device
        inputs = observation.to(device)
        context = EpisodeContext(inputs.exists, inputs.candidates, memory.named)
        base, slots = policy.normalised(inputs, memory.available)
        sequences = (part.unsqueeze(1) for part in (base, slots, inputs.blueprints))
        output = policy(*sequences, memory.state, context)
        distribution = policy.distribution(output.logits, inputs.masks)
        behaviour = distribution
        if self._explore:
            behaviour = policy.distribution(output.logits, inputs.masks, validate=False, explore=True)
        if self._greedy:
            action = distribution.mode()
        else:
            action = behaviour.sample(self._draw_noise(memory.noise, observation.exists).to(device, non_blocking=True))
        decision = PolicyDecision(
            action=action,
            log_prob=distribution.log_prob(action),
            behaviour=behaviour.log_prob(action),
            value=output.value.squeeze(1),
            inputs=inputs,
            context=context,
            base=base,
            slots=slots,
            distribution=distribution,
        )
        return decision, replace(memory, state=output.state)

    def _draw_noise(self, generators: Sequence[torch.Generator], exists: Tensor) -> Tensor:
        """Noise [envs, options of all heads]; an episode draws for its own slots only, whatever its neighbours have."""
        layout = self._policy.layout
        is_drawn = torch.ones(len(generators), noise_width(layout), dtype=torch.bool)
        if "slot" in layout.options:
            start = len(layout.ops)
            is_drawn[:, start : start + len(layout.slots)] = exists.cpu()
        noise = torch.ones(is_drawn.shape)
        for row, columns, generator in zip(noise, is_drawn, generators, strict=True):
            row[columns] = torch.empty(int(columns.sum())).exponential_(generator=generator)
        return noise


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
        names = ("base", "slots", "blueprints")
        swapped = {name: getattr(observation, name).roll(1, 0) for name in names}
        return self._controller.act(replace(observation, **swapped), memory)


class BlindPolicyController:
    """A control: a policy controller that sees the mean of each feature, from its own statistics of training.

    Masks, descriptors of blueprints and the seeds that it has planted stay. What it scores less than the policy itself
    is what observing is worth.
    """

    def __init__(self, controller: PolicyController) -> None:
        self._controller = controller
        self.flops = controller.flops

    def begin(self, episode_seeds: Sequence[int]) -> PolicyMemory:
        return self._controller.begin(episode_seeds)

    def act(self, observation: PolicyInputs, memory: PolicyMemory) -> tuple[Tensor, PolicyMemory]:
        means = self._controller.feature_means
        base, slots = (
            mean.to(known).expand_as(known)
            for mean, known in zip(means, (observation.base, observation.slots), strict=True)
        )
        slots = torch.where(observation.exists.unsqueeze(-1), slots, 0.0)
        return self._controller.act(replace(observation, base=base, slots=slots), memory)


class ShuffledPolicyController:
    """A control: a policy controller for which the descriptors of each blueprint are those of another one.

    Each episode has one order, in which no blueprint keeps its own. Names of blueprints stay.
    """

    def __init__(self, controller: PolicyController) -> None:
        if controller.blueprint_count < 2:
            raise ValueError("ppo_shuffled: slots.blueprints must have at least two, to exchange their descriptors.")
        self._controller = controller
        self.flops = controller.flops

    def begin(self, episode_seeds: Sequence[int]) -> tuple[Tensor, PolicyMemory]:
        orders = [_derange(self._controller.blueprint_count, episode_seed) for episode_seed in episode_seeds]
        return torch.tensor(orders), self._controller.begin(episode_seeds)  # int64 [envs, blueprints]

    def act(
        self, observation: PolicyInputs, memory: tuple[Tensor, PolicyMemory]
    ) -> tuple[Tensor, tuple[Tensor, PolicyMemory]]:
        orders, own = memory
        known = observation.candidates
        index = orders.to(known.device)[:, None, :, None].expand_as(known)
        action, own = self._controller.act(replace(observation, candidates=known.gather(2, index)), own)
        return action, (orders, own)


def _derange(count: int, episode_seed: int) -> list[int]:
    """A random order in which no number keeps its place: one cycle of all (Sattolo, 1986)."""
    generator, order = make_generator("shuffled descriptors", episode_seed), list(range(count))
    for last in range(count - 1, 0, -1):
        other = int(torch.randint(last, (), generator=generator))
        order[last], order[other] = order[other], order[last]
    return order


def _draw_uniform(purpose: str, episode_seed: int, count: int) -> Tensor:
    return torch.rand(count, generator=make_generator(purpose, episode_seed))
