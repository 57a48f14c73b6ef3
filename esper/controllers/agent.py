"""Agents that know nothing of esper: they see named arrays of a fixed size, and choose actions by number."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from esper.controllers.controller import Controller
from esper.environment import Environment
from esper.lifecycle import ActionSpace, Masks
from esper.observation import Observation
from esper.rng import derive_seed

OBSERVATION_BOUND = 2.0  # features are scaled to about [-1, 1]; outliers are clipped

AgentObservation = dict[str, np.ndarray]
AgentInfo = dict[str, Any]
HIDDEN_FROM_AGENTS = ("task", "family")  # from an agent that is scored: it has to find out what a host lacks


class Agent(Protocol):
    """Decides in one episode. Each episode has a new object, so it may remember what it has seen."""

    def act(self, observation: AgentObservation, info: AgentInfo) -> int:
        """The number of an action."""


def flat_actions(space: ActionSpace) -> Tensor:
    """Every combination of an op with the options of the heads it uses: int64 [actions, heads]; unused heads are 0."""
    rows = []
    for index, op in enumerate(space.ops):
        options = [range(head.size) if op in head.ops else range(1) for head in space.heads[1:]]
        rows += [[index, *choice] for choice in product(*options)]
    return torch.tensor(rows)


def flat_mask(actions: Tensor, masks: Masks, space: ActionSpace) -> Tensor:
    """Which of the flat actions are legal in the first environment: bool [actions]."""
    op = actions[:, 0]
    slot = masks.slot[0, op, actions[:, 1]]
    needs_slot = space.uses()[op, 1]
    return masks.op[0, op] & (slot | ~needs_slot)


def name_action(action: Sequence[int], space: ActionSpace) -> str:
    """The op of an action and the options of the heads that it uses, such as `GERMINATE block2 depthwise`."""
    op = space.ops[action[0]]
    return " ".join(
        [op.name]
        + [head.options[option] for head, option in zip(space.heads[1:], action[1:], strict=True) if op in head.ops]
    )


class AgentInterface:
    """What agents see of the episodes of an environment, and what the numbers of actions mean.

    Hosts may have different slots. Arrays and numbers are those of `space`, so that they have the same size and meaning
    for all hosts; what belongs to a slot that the host lacks is 0, and its actions are illegal.

    Arguments:
        environment: that episodes run in
        space: the action space of the environment, or one with more slots
    """

    def __init__(self, environment: Environment, space: ActionSpace) -> None:
        self.environment, self.space = environment, space
        own, actions = environment.space, flat_actions(space)
        self.action_names: tuple[str, ...] = tuple(name_action(action, space) for action in actions.tolist())
        self.columns: dict[str, tuple[str, ...]] = {
            "host": environment.layout.base,
            "slots": environment.layout.slot,
            "candidates": environment.layout.candidate,
        }
        self._rows = torch.tensor([space.slots.index(slot) for slot in own.slots])
        options = [own.slot_options.index(name) if name in own.slot_options else -1 for name in space.slot_options]
        place = torch.tensor(options)[actions[:, 1]]
        self._has_slot = (place >= 0) | ~space.uses()[actions[:, 0], 1]
        actions[:, 1] = place.clamp(min=0)
        self._actions = actions

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array of an observation."""
        slots, columns = len(self.space.slots), {name: len(names) for name, names in self.columns.items()}
        return {
            "host": (columns["host"],),
            "slots": (slots, columns["slots"]),
            "exists": (slots,),
            "blueprints": (slots,),
            "candidates": (slots, len(self.space.blueprints), columns["candidates"]),
        }

    def observe(self, observation: Observation) -> AgentObservation:
        """The arrays of the first environment: host, slots and candidates float32, exists int8, blueprints int64."""
        parts = {
            "host": observation.base[0].clamp(-OBSERVATION_BOUND, OBSERVATION_BOUND),
            "slots": self._pad(observation.slots[0].clamp(-OBSERVATION_BOUND, OBSERVATION_BOUND)),
            "exists": self._pad(observation.exists[0].to(torch.int8)),
            "blueprints": self._pad(observation.blueprints[0]),
            "candidates": self._pad(observation.candidates[0].clamp(-OBSERVATION_BOUND, OBSERVATION_BOUND)),
        }
        return {name: part.numpy() for name, part in parts.items()}

    def _pad(self, by_slot: Tensor) -> Tensor:
        """A copy of [slots, ...] with a row for each slot of `space`."""
        padded = by_slot.new_zeros(len(self.space.slots), *by_slot.shape[1:])
        padded[self._rows] = by_slot
        return padded

    def mask(self, masks: Masks) -> np.ndarray:
        """Which actions are legal in the first environment: bool [actions]."""
        return (self._has_slot & flat_mask(self._actions, masks, self.environment.space)).numpy()

    def describe(self, observation: Observation, episode_seed: int) -> AgentInfo:
        """What `info` has about the first environment, whose episode has this seed."""
        view, pool = observation.view, self.environment.host_pool
        return {
            "task": pool.host_name(episode_seed),
            "family": pool.task(episode_seed).family,
            "step": view.step,
            "steps": view.steps,
            "flops": view.now.flops[0].item(),
            "score": view.now.score[0].item(),
            "loss": view.now.loss[0].item(),
            "parameters": view.now.parameters[0].item(),
            "action_mask": self.mask(observation.masks).astype(np.int8),
            "rng_seed": derive_seed("agent", episode_seed),
        }

    def action(self, number: int) -> Tensor:
        """The action [heads] of the environment that has a number."""
        return self._actions[number]


@dataclass(frozen=True)
class AgentEpisode:
    """An agent in its episode."""

    agent: Agent
    episode_seed: int


class AgentController:
    """Agents as a controller: one agent for each episode. An action that is not legal is refused.

    Arguments:
        interface: what agents see and choose
        build: builds the agent of an episode
        name: of the agent, for messages
        flops: of a decision
    """

    def __init__(self, interface: AgentInterface, build: Callable[[], Agent], *, name: str, flops: int = 0) -> None:
        self.flops = flops
        self._interface, self._build, self._name = interface, build, name

    def begin(self, episode_seeds: Sequence[int]) -> list[AgentEpisode]:
        return [AgentEpisode(self._build(), episode_seed) for episode_seed in episode_seeds]

    def act(self, observation: Observation, memory: list[AgentEpisode]) -> tuple[Tensor, list[AgentEpisode]]:
        return torch.stack([self._act_in(observation, env, episode) for env, episode in enumerate(memory)]), memory

    def _act_in(self, observation: Observation, env: int, episode: AgentEpisode) -> Tensor:
        """The action [heads] of one environment."""
        own = observation.rows(slice(env, env + 1))
        described = self._interface.describe(own, episode.episode_seed)
        info = {key: value for key, value in described.items() if key not in HIDDEN_FROM_AGENTS}
        legal = info["action_mask"].copy()  # the agent may change its own
        chosen, names = episode.agent.act(self._interface.observe(own), info), self._interface.action_names
        try:
            number = operator.index(chosen)
        except TypeError:
            number = -1
        if not 0 <= number < len(names):
            raise ValueError(f"{self._name}: act returned {chosen!r}; must be a number from 0 to {len(names) - 1}.")
        if not legal[number]:
            place = f"step {own.view.step} of {self._interface.environment.host_pool.host_name(episode.episode_seed)}"
            raise ValueError(
                f"{self._name}: action {number} ({names[number]}) is not legal in {place}; must be one where "
                'info["action_mask"] is 1.'
            )
        return self._interface.action(number)


class CheckedController:
    """A controller whose actions must be legal; others are refused.

    Arguments:
        controller: that decides
        space: the action space
        name: of the controller, for messages
    """

    def __init__(self, controller: Controller[Any], space: ActionSpace, *, name: str) -> None:
        self.flops = getattr(controller, "flops", 0)
        self.controller, self._space, self._name = controller, space, name

    def begin(self, episode_seeds: Sequence[int]) -> Any:
        return self.controller.begin(episode_seeds)

    def act(self, observation: Observation, memory: Any) -> tuple[Tensor, Any]:
        action, memory = self.controller.act(observation, memory)
        space, expected = self._space, (len(observation.base), len(self._space.heads))
        if not isinstance(action, Tensor) or action.dtype != torch.int64 or action.shape != expected:
            raise ValueError(f"{self._name}: act must return an int64 tensor of shape {list(expected)} and its memory.")
        for env, row in enumerate(action.tolist()):
            for head, option in zip(space.heads, row, strict=True):
                if not 0 <= option < head.size:
                    raise ValueError(f"{self._name}: {head.name} {option} must be from 0 to {head.size - 1}.")
            masks = observation.rows(slice(env, env + 1)).masks
            if not flat_mask(action[env : env + 1].cpu(), masks, space)[0]:
                legal = [op.name for op, is_legal in zip(space.ops, masks.op[0].tolist(), strict=True) if is_legal]
                raise ValueError(
                    f"{self._name}: {name_action(row, space)} is not legal in step {observation.view.step}; legal ops "
                    f"are {', '.join(legal)}, in slots where their mask is true."
                )
        return action, memory
