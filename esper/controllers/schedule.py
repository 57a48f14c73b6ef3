"""Growth on a fixed schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
ALIASES = ("first", "middle", "last")  # slots by their place in the host


@dataclass(frozen=True)
class ScheduleEntry:
    """One germination."""

    at: float  # a step, or a share of the episode if below 1
    slot: str  # a slot name, or first, middle or last of the host
    blueprint: Sequence[str]  # in order of preference; the first that the action space has is used
    blend: str = Blend.ADD.name


class ScheduleController:
    """Germinates seeds on a schedule, and fossilises every seed as soon as that is legal.

    Seeds that the rules commit automatically are not fossilised: a step has one action, and germinations come in time.
    An entry that is not legal at its time waits until it is. An entry for the slot of an earlier entry, or for one that
    an episode's host lacks, is skipped.

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
            if entry.slot not in (*ALIASES, *space.slots):
                allowed = ", ".join((*ALIASES, *space.slots))
                raise ValueError(f"schedule: slot={entry.slot}: must be one of {allowed}.")
            self._entries.append(entry)
        self._by_host: dict[tuple[str, ...], list[ScheduleEntry]] = {}  # by the slots of the host

    def begin(self, episode_seeds: Sequence[int]) -> list[int]:
        return [0] * len(episode_seeds)  # number of finished entries

    def act(self, observation: Observation, memory: list[int]) -> tuple[Tensor, list[int]]:
        view = observation.view
        return self.choose(observation.masks, observation.exists, view.step, view.steps, memory)

    def choose(
        self, masks: Masks, exists: Tensor, step: int, steps: int, memory: list[int]
    ) -> tuple[Tensor, list[int]]:
        """As `act`, from the legal options after `step` of `steps` steps: a schedule depends on nothing else.

        `exists`, bool [envs, slots], is which slots the hosts have.
        """
        plans = [self.entries_of(row) for row in exists]
        pairs = [self._choose_in(masks, env, step, steps, done, plans[env]) for env, done in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [done for _, done in pairs]

    def entries_of(self, exists: Tensor) -> list[ScheduleEntry]:
        """The germinations in a host with some slots, bool [slots], by time and with the names of slots."""
        own = self._space.present_slots(exists)
        if own not in self._by_host:
            named = [replace(entry, slot=_resolve_slot(entry.slot, own)) for entry in self._entries]
            by_slot: dict[str, ScheduleEntry] = {}
            for entry in named:
                if entry.slot in own:
                    by_slot.setdefault(entry.slot, entry)
            self._by_host[own] = sorted(by_slot.values(), key=lambda entry: entry.at)
        return self._by_host[own]

    def _choose_in(
        self, masks: Masks, env: int, step: int, steps: int, done: int, entries: Sequence[ScheduleEntry]
    ) -> tuple[Tensor, int]:
        space = self._space
        for slot in space.slots if self._fossilizes else ():
            if is_legal(space, masks, env, Op.FOSSILIZE, slot):
                return make_action(space, Op.FOSSILIZE, slot=slot), done
        if done < len(entries):
            entry = entries[done]
            due = entry.at * steps if entry.at < 1 else entry.at
            if step >= due and is_legal(space, masks, env, Op.GERMINATE, entry.slot):
                options = {"slot": entry.slot, "blueprint": first_available(space, entry.blueprint)}
                return make_action(space, Op.GERMINATE, **options, blend=entry.blend), done + 1
        for slot in space.slots:
            if is_legal(space, masks, env, Op.ADVANCE, slot):
                return make_action(space, Op.ADVANCE, slot=slot), done
        return wait_action(space), done


def _resolve_slot(name: str, slots: Sequence[str]) -> str:
    """The name of a slot for first, middle or last of some slots; another name is one already."""
    places = dict(zip(ALIASES, (0, (len(slots) - 1) // 2, -1), strict=True))
    return slots[places[name]] if name in places else name


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


def keeps_every_seed(
    space: ActionSpace, rules: Rules, steps: int, entries: Sequence[ScheduleEntry], exists: Tensor | None = None
) -> bool:
    """Whether each entry of a schedule germinates, and its seed is committed by the end of the episode.

    Episodes are simulated without hosts: seeds are healthy and contribute.

    Arguments:
        space, rules, steps: of the episode
        entries: the schedule; entries for slots that a host lacks do not count
        exists: bool [hosts, slots], the slots of each host; None is one host with all slots
    """
    controller = ScheduleController(space, entries, rules=rules)
    hosts = 1 if exists is None else len(exists)
    slots, memory = Slots.empty(hosts, len(space.slots), exists=exists), controller.begin([0] * hosts)
    useful = SeedMeasurements(torch.full_like(slots.alpha, torch.inf), torch.ones_like(slots.alpha))
    for step in range(steps):
        action, memory = controller.choose(legal(slots, space, rules), slots.exists, step, steps, memory)
        slots, _ = apply(slots, action, space, rules)
        if step + 1 == steps:
            slots, _ = commit(slots, rules)
        slots, _ = tick(slots, useful, space, rules)
    kept = (slots.stage == Stage.FOSSILIZED).sum(1).tolist()
    own = [space.present_slots(row) for row in slots.exists]
    return bool(kept == [sum(_resolve_slot(entry.slot, names) in names for entry in entries) for names in own])
