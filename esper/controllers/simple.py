"""Controllers without rules worth a file: nothing, chance, a timetable, a repetition."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.controllers.controller import available, choose, is_legal, wait
from esper.environment import Observation
from esper.lifecycle import ActionSpace, Blend, Masks, Op
from esper.seeding import generator


class Nothing:
    """Always waits: the host alone."""

    def __init__(self, space: ActionSpace) -> None:
        self._space = space

    def begin(self, seeds: Sequence[int]) -> None:
        return None

    def act(self, observation: Observation, memory: None) -> tuple[Tensor, None]:
        return wait(self._space).expand(len(observation.base), -1), None


class Chance:
    """Uniform over legal actions: op, slot and every further head drawn evenly among all that is legal together."""

    def __init__(self, space: ActionSpace) -> None:
        self._space = space

    def begin(self, seeds: Sequence[int]) -> list[torch.Generator]:
        return [generator("action noise", seed) for seed in seeds]

    def act(self, observation: Observation, memory: list[torch.Generator]) -> tuple[Tensor, list[torch.Generator]]:
        masks = observation.masks
        return torch.stack([self._one(masks, env, draws) for env, draws in enumerate(memory)]), memory

    def _one(self, masks: Masks, env: int, draws: torch.Generator) -> Tensor:
        """An op is drawn by how many actions it stands for, so that all actions are equally likely."""
        space = self._space
        counts = torch.ones(len(space.ops))
        for head in space.heads[1:]:
            used = torch.tensor([op in head.ops for op in space.ops])
            options = masks.slot[env].sum(-1) if head.name == "slot" else masks.others[head.name][env].sum()
            counts *= torch.where(used, options, torch.ones_like(counts))
        op = _draw(counts * masks.op[env], draws)
        columns = [op]
        for head in space.heads[1:]:
            mask = masks.slot[env, op] if head.name == "slot" else masks.others[head.name][env]
            columns.append(_draw(mask.float(), draws) if space.ops[op] in head.ops else 0)
        return torch.tensor(columns)


def _draw(weights: Tensor, draws: torch.Generator) -> int:
    return int(torch.multinomial(weights, 1, generator=draws))


@dataclass(frozen=True)
class Entry:
    """A germination at a time: a step, or a share of the episode if below 1."""

    at: float
    slot: str  # a name, or first, middle, last
    blueprint: Sequence[str]  # the first that the host can have
    blend: str = Blend.ADD.name


class Schedule:
    """Germinates by a timetable, and fossilises every seed as soon as it may.

    An entry that is not legal at its time waits until it is; one whose slot an earlier entry has is left out.
    """

    def __init__(self, space: ActionSpace, entries: Sequence[Mapping[str, object]]) -> None:
        self._space = space
        self._entries: list[Entry] = []
        for given in entries:
            if not {"at", "slot", "blueprint"} <= set(given) <= set(Entry.__dataclass_fields__):
                wanted = ", ".join(Entry.__dataclass_fields__)
                raise ValueError(
                    f"controller.schedule.entries: {dict(given)} must have the keys {wanted} (blend may miss)."
                )
            entry = Entry(**given)  # type: ignore[arg-type]
            if entry.blend not in Blend.__members__:
                raise ValueError(
                    f"controller.schedule: blend={entry.blend} must be one of {', '.join(Blend.__members__)}."
                )
            available(space, entry.blueprint)
            if self._slot(entry.slot) not in [self._slot(other.slot) for other in self._entries]:
                self._entries.append(entry)
        self._entries.sort(key=lambda entry: entry.at)

    def begin(self, seeds: Sequence[int]) -> list[int]:
        return [0] * len(seeds)  # entries done

    def act(self, observation: Observation, memory: list[int]) -> tuple[Tensor, list[int]]:
        pairs = [self._one(observation, env, done) for env, done in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [done for _, done in pairs]

    def _one(self, observation: Observation, env: int, done: int) -> tuple[Tensor, int]:
        space, view, masks = self._space, observation.view, observation.masks
        for slot in space.slots:
            if is_legal(space, masks, env, Op.FOSSILIZE, slot):
                return choose(space, Op.FOSSILIZE, slot=slot), done
        if done < len(self._entries):
            entry = self._entries[done]
            due = entry.at * view.steps if entry.at < 1 else entry.at
            slot = self._slot(entry.slot)
            if view.step >= due and is_legal(space, masks, env, Op.GERMINATE, slot):
                blueprint = available(space, entry.blueprint)
                return choose(space, Op.GERMINATE, slot=slot, blueprint=blueprint, blend=entry.blend), done + 1
        for slot in space.slots:
            if is_legal(space, masks, env, Op.ADVANCE, slot):
                return choose(space, Op.ADVANCE, slot=slot), done
        return wait(space), done

    def _slot(self, name: str) -> str:
        slots = self._space.slots
        places = {"first": slots[0], "middle": slots[(len(slots) - 1) // 2], "last": slots[-1]}
        found = places.get(name, name)
        if found not in slots:
            raise ValueError(f"schedule: slot={name} is unknown; allowed are first, middle, last, {', '.join(slots)}.")
        return found


class Replay:
    """Repeats a recorded episode's actions, whatever it sees; what is not legal at its time becomes WAIT."""

    def __init__(self, space: ActionSpace, actions: Sequence[Mapping[str, str]]) -> None:
        """`actions` are a step's options by head, as episode records have them."""
        self._space = space
        known = {head.name: head.options for head in space.heads}
        for number, step in enumerate(actions):
            for head, option in step.items():
                if option not in known.get(head, ()):
                    allowed = ", ".join(known.get(head, ())) or "nothing"
                    raise ValueError(f"replay: step {number} has {head}={option}; this action space allows {allowed}.")
        self._actions = [
            choose(space, Op[step["op"]], **{head: option for head, option in step.items() if head != "op"})
            for step in actions
        ]

    def begin(self, seeds: Sequence[int]) -> None:
        return None

    def act(self, observation: Observation, memory: None) -> tuple[Tensor, None]:
        space, envs, step = self._space, len(observation.base), observation.view.step
        if step >= len(self._actions):
            return wait(space).expand(envs, -1), None
        action = self._actions[step]
        op, slot = space.ops[int(action[0])], space.slots[int(action[1])]
        waiting = wait(space)
        legal = [op is Op.WAIT or is_legal(space, observation.masks, env, op, slot) for env in range(envs)]
        return torch.stack([action if may else waiting for may in legal]), None
