"""Growth on a fixed schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.controllers.controller import first_available, is_legal, make_action, wait_action
from esper.lifecycle import (
    ActionSpace,
    Blend,
    Masks,
    Op,
    Rules,
    SeedMeasurements,
    Slots,
    Stage,
    apply,
    commit,
    legal,
    tick,
)
from esper.observation import Observation
from esper.rng import make_generator

RANDOM_STREAM = "schedule"


@dataclass(frozen=True)
class ScheduleEntry:
    """One germination."""

    at: float  # a step, or a share of the episode if below 1
    slot: str  # a slot name, or first, middle or last
    blueprint: Sequence[str]  # in order of preference; the first that the action space has is used
    blend: str = Blend.ADD.name


class ScheduleController:
    """Germinates seeds on a schedule, and fossilises every seed as soon as that is legal.

    Seeds that the rules commit automatically are not fossilised: a step has one action, and germinations come in time.
    An entry that is not legal at its time waits until it is. An entry for the slot of an earlier entry is skipped.

    Arguments:
        space: the action space
        entries: the germinations; mappings, as in a configuration, have the fields of ScheduleEntry as keys
        rules: the lifecycle rules; None is explicit commits
    """

    flops = 0

    def __init__(
        self,
        space: ActionSpace,
        entries: Sequence[ScheduleEntry | Mapping[str, object]],
        *,
        rules: Rules | None = None,
    ) -> None:
        self._space = space
        self._fossilizes = rules is None or rules.commit == "explicit"
        self._entries: list[ScheduleEntry] = []
        for item in entries:
            entry = item if isinstance(item, ScheduleEntry) else _parse_entry(item)
            first_available(space, entry.blueprint)
            if self._slot(entry.slot) not in [self._slot(other.slot) for other in self._entries]:
                self._entries.append(entry)
        self._entries.sort(key=lambda entry: entry.at)

    def begin(self, episode_seeds: Sequence[int]) -> list[int]:
        return [0] * len(episode_seeds)  # number of finished entries

    def act(self, observation: Observation, memory: list[int]) -> tuple[Tensor, list[int]]:
        view = observation.view
        return self.choose(observation.masks, view.step, view.steps, memory)

    def choose(self, masks: Masks, step: int, steps: int, memory: list[int]) -> tuple[Tensor, list[int]]:
        """As `act`, from the legal options after `step` of `steps` steps: a schedule depends on nothing else."""
        pairs = [self._choose_in(masks, env, step, steps, done) for env, done in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [done for _, done in pairs]

    def _choose_in(self, masks: Masks, env: int, step: int, steps: int, done: int) -> tuple[Tensor, int]:
        space = self._space
        for slot in space.slots if self._fossilizes else ():
            if is_legal(space, masks, env, Op.FOSSILIZE, slot):
                return make_action(space, Op.FOSSILIZE, slot=slot), done
        if done < len(self._entries):
            entry = self._entries[done]
            due = entry.at * steps if entry.at < 1 else entry.at
            slot = self._slot(entry.slot)
            if step >= due and is_legal(space, masks, env, Op.GERMINATE, slot):
                blueprint = first_available(space, entry.blueprint)
                return make_action(space, Op.GERMINATE, slot=slot, blueprint=blueprint, blend=entry.blend), done + 1
        for slot in space.slots:
            if is_legal(space, masks, env, Op.ADVANCE, slot):
                return make_action(space, Op.ADVANCE, slot=slot), done
        return wait_action(space), done

    def _slot(self, name: str) -> str:
        slots = self._space.slots
        aliases = {"first": slots[0], "middle": slots[(len(slots) - 1) // 2], "last": slots[-1]}
        slot = aliases.get(name, name)
        if slot not in slots:
            raise ValueError(f"schedule: slot={name}: must be one of first, middle, last, {', '.join(slots)}.")
        return slot


def _parse_entry(item: Mapping[str, object]) -> ScheduleEntry:
    fields = ScheduleEntry.__dataclass_fields__
    if not {"at", "slot", "blueprint"} <= set(item) <= set(fields):
        keys = ", ".join(fields)
        raise ValueError(f"controller.schedule.entries: {dict(item)}: must have the keys {keys}; blend is optional.")
    entry = ScheduleEntry(**item)  # type: ignore[arg-type]
    if entry.blend not in Blend.__members__:
        raise ValueError(f"controller.schedule: blend={entry.blend}: must be one of {', '.join(Blend.__members__)}.")
    return entry


def random_schedule(space: ActionSpace, steps: int, rng_seed: int) -> list[ScheduleEntry]:
    """A random schedule for episodes of `steps` steps.

    It has some slots, each once, at random steps, with random blueprints and blends.
    """
    generator = make_generator(RANDOM_STREAM, rng_seed)

    def draw(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    order = torch.randperm(len(space.slots), generator=generator).tolist()
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


def keeps_every_seed(space: ActionSpace, rules: Rules, steps: int, entries: Sequence[ScheduleEntry]) -> bool:
    """Whether each entry of a schedule germinates, and its seed is committed by the end of the episode.

    The episode is simulated without a host: seeds are healthy and contribute.
    """
    controller = ScheduleController(space, entries, rules=rules)
    slots, memory = Slots.empty(1, len(space.slots)), controller.begin([0])
    useful = SeedMeasurements(torch.full_like(slots.alpha, torch.inf), torch.ones_like(slots.alpha))
    for step in range(steps):
        action, memory = controller.choose(legal(slots, space, rules), step, steps, memory)
        slots, _ = apply(slots, action, space, rules)
        if step + 1 == steps:
            slots, _ = commit(slots, rules)
        slots, _ = tick(slots, useful, space, rules)
    return int((slots.stage == Stage.FOSSILIZED).sum()) == len(entries)
