"""Growth by a timetable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.controllers.controller import available, choose, is_legal, wait
from esper.environment import Observation
from esper.lifecycle import ActionSpace, Blend, Op
from esper.seeding import generator


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

    flops = 0

    def __init__(self, space: ActionSpace, entries: Sequence[Entry | Mapping[str, object]]) -> None:
        """`entries` may be plain data, as a configuration has them."""
        self._space = space
        self._entries: list[Entry] = []
        for given in entries:
            entry = given if isinstance(given, Entry) else _entry(given)
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


def _entry(given: Mapping[str, object]) -> Entry:
    known = Entry.__dataclass_fields__
    if not {"at", "slot", "blueprint"} <= set(given) <= set(known):
        wanted = ", ".join(known)
        raise ValueError(f"controller.schedule.entries: {dict(given)} must have the keys {wanted} (blend may miss).")
    entry = Entry(**given)  # type: ignore[arg-type]
    if entry.blend not in Blend.__members__:
        raise ValueError(f"controller.schedule: blend={entry.blend} must be one of {', '.join(Blend.__members__)}.")
    return entry


def random_entries(space: ActionSpace, steps: int, seed: int) -> list[Entry]:
    """A timetable by chance, for episodes of so many steps: some slots, each once, at any time, with anything."""
    draws = generator("timetable", seed)

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=draws))

    order = torch.randperm(len(space.slots), generator=draws).tolist()
    blends = next((head.options for head in space.heads if head.name == "blend"), (Blend.ADD.name,))
    return [
        Entry(
            at=draw(steps),
            slot=space.slots[column],
            blueprint=[space.blueprints[draw(len(space.blueprints))]],
            blend=blends[draw(len(blends))],
        )
        for column in order[: draw(len(space.slots) + 1)]
    ]
