"""Growth by a timetable."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.controllers.controller import first_available, is_legal, make_action, wait_action
from esper.lifecycle import ActionSpace, Blend, Op
from esper.observation import Observation
from esper.rng import make_generator


@dataclass(frozen=True)
class ScheduleEntry:
    """A germination at a time: a step, or a share of the episode if below 1."""

    at: float
    slot: str  # a name, or first, middle, last
    blueprint: Sequence[str]  # the first that the host can have
    blend: str = Blend.ADD.name


class ScheduleController:
    """Germinates by a timetable, and fossilises every seed as soon as it may.

    An entry that is not legal at its time waits until it is; one whose slot an earlier entry has is left out.
    """

    flops = 0

    def __init__(self, space: ActionSpace, entries: Sequence[ScheduleEntry | Mapping[str, object]]) -> None:
        """`entries` may be plain data, as a configuration has them."""
        self._space = space
        self._entries: list[ScheduleEntry] = []
        for given in entries:
            entry = given if isinstance(given, ScheduleEntry) else _entry(given)
            first_available(space, entry.blueprint)
            if self._slot(entry.slot) not in [self._slot(other.slot) for other in self._entries]:
                self._entries.append(entry)
        self._entries.sort(key=lambda entry: entry.at)

    def begin(self, episode_seeds: Sequence[int]) -> list[int]:
        return [0] * len(episode_seeds)  # entries done

    def act(self, observation: Observation, memory: list[int]) -> tuple[Tensor, list[int]]:
        pairs = [self._one(observation, env, done) for env, done in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [done for _, done in pairs]

    def _one(self, observation: Observation, env: int, done: int) -> tuple[Tensor, int]:
        space, view, masks = self._space, observation.view, observation.masks
        for slot in space.slots:
            if is_legal(space, masks, env, Op.FOSSILIZE, slot):
                return make_action(space, Op.FOSSILIZE, slot=slot), done
        if done < len(self._entries):
            entry = self._entries[done]
            due = entry.at * view.steps if entry.at < 1 else entry.at
            slot = self._slot(entry.slot)
            if view.step >= due and is_legal(space, masks, env, Op.GERMINATE, slot):
                blueprint = first_available(space, entry.blueprint)
                return make_action(space, Op.GERMINATE, slot=slot, blueprint=blueprint, blend=entry.blend), done + 1
        for slot in space.slots:
            if is_legal(space, masks, env, Op.ADVANCE, slot):
                return make_action(space, Op.ADVANCE, slot=slot), done
        return wait_action(space), done

    def _slot(self, name: str) -> str:
        slots = self._space.slots
        places = {"first": slots[0], "middle": slots[(len(slots) - 1) // 2], "last": slots[-1]}
        found = places.get(name, name)
        if found not in slots:
            raise ValueError(f"schedule: slot={name} is unknown; allowed are first, middle, last, {', '.join(slots)}.")
        return found


def _entry(given: Mapping[str, object]) -> ScheduleEntry:
    known = ScheduleEntry.__dataclass_fields__
    if not {"at", "slot", "blueprint"} <= set(given) <= set(known):
        wanted = ", ".join(known)
        raise ValueError(f"controller.schedule.entries: {dict(given)} must have the keys {wanted} (blend may miss).")
    entry = ScheduleEntry(**given)  # type: ignore[arg-type]
    if entry.blend not in Blend.__members__:
        raise ValueError(f"controller.schedule: blend={entry.blend} must be one of {', '.join(Blend.__members__)}.")
    return entry


def random_schedule(space: ActionSpace, steps: int, rng_seed: int) -> list[ScheduleEntry]:
    """A timetable by chance, for episodes of so many steps: some slots, each once, at any time, with anything."""
    draws = make_generator("timetable", rng_seed)

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=draws))

    order = torch.randperm(len(space.slots), generator=draws).tolist()
    blends = next((head.options for head in space.heads if head.name == "blend"), (Blend.ADD.name,))
    return [
        ScheduleEntry(
            at=draw(steps),
            slot=space.slots[column],
            blueprint=[space.blueprints[draw(len(space.blueprints))]],
            blend=blends[draw(len(blends))],
        )
        for column in order[: draw(len(space.slots) + 1)]
    ]
