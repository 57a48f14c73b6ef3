"""Rules that decide what grows in any host: they are chosen on training tasks, and carry over to others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from esper.controllers import ScheduleEntry, keeps_every_seed
from esper.evaluation.arm_context import ArmContext
from esper.evaluation.plans import FIRST_MOMENTS, SCHEDULE_ATTEMPTS, Plan, first_blueprint
from esper.lifecycle import ActionSpace, Blend, Rules
from esper.rng import derive_seed, make_generator
from esper.tasks import slots_in

PATTERNS = (  # places that the seeds of a random schedule have; see PLACES of esper.tasks
    ("all",), ("front", "back"), ("front",), ("back",), ("first",), ("middle",), ("last",), ("first", "last"),
    ("first", "middle", "last"),
)  # fmt: skip


class GrowthRule(Protocol):
    """A rule for any host."""

    def plan(self, context: ArmContext, slots: Sequence[str]) -> Plan:
        """What it does in a host with these slots."""

    def describe(self, context: ArmContext) -> str:
        """In a few words, for the report."""


@dataclass(frozen=True)
class MomentRule:
    """Growth of the whole host at one moment."""

    arm: str  # grow_once or net2net
    moment: float  # share of the budget

    def plan(self, context: ArmContext, slots: Sequence[str]) -> Plan:
        if self.arm == "net2net":
            return context.widened_plan(self.moment)
        return context.filled_plan(at=self.moment).within(slots)

    def describe(self, context: ArmContext) -> str:
        space = context.environment.space
        growth = f"{first_blueprint(context.blueprint, space)} in every slot"
        if self.arm == "net2net":
            growth = f"widened to {context.net2net_host}"
        return f"{growth} at {self.moment:g} of the budget"


@dataclass(frozen=True)
class RelativeSchedule:
    """Germinations at shares of an episode, in places of a host instead of named slots."""

    entries: tuple[tuple[float, str, str, str], ...]  # share, place, blueprint, blend

    def germinations(self, slots: Sequence[str]) -> list[ScheduleEntry]:
        """In a host with these slots; each slot germinates once, at the earliest of its places."""
        by_slot: dict[str, ScheduleEntry] = {}
        for at, place, blueprint, blend in sorted(self.entries):
            for slot in slots_in(place, slots):
                by_slot.setdefault(slot, ScheduleEntry(at, slot, [blueprint], blend))
        return list(by_slot.values())

    def plan(self, context: ArmContext, slots: Sequence[str]) -> Plan:
        return Plan(context.blind_start, tuple(self.germinations(slots)))

    def describe(self, context: ArmContext) -> str:
        parts = [
            f"{blueprint} in {place} at {at:.2g}" + (f", blended by {blend}" if blend != Blend.ADD.name else "")
            for at, place, blueprint, blend in sorted(self.entries)
        ]
        return "; ".join(parts)


def relative_schedules(
    space: ActionSpace, rules: Rules, steps: int, blueprint: str, rng_seed: int, exists: Tensor
) -> Iterator[RelativeSchedule]:
    """Schedules whose seeds can all be kept in every host: sensible ones first, then random ones without repetition.

    Arguments:
        space, rules, steps: of the episodes
        blueprint: of the first schedules
        rng_seed: of the random schedules
        exists: bool [hosts, slots], the slots of each host
    """
    first = [
        RelativeSchedule(((moment, "all", name, Blend.ADD.name),))
        for name in dict.fromkeys((blueprint, *space.blueprints))
        for moment in (FIRST_MOMENTS if name == blueprint else FIRST_MOMENTS[1:2])
    ]
    hosts = list({tuple(row.tolist()): row for row in exists}.values())  # with different slots
    seen: set[RelativeSchedule] = set()
    unused = 0
    for number, schedule in enumerate(chain(first, _random_relative_schedules(space, steps, rng_seed))):
        is_new = schedule not in seen and all(_is_kept(schedule, space, rules, steps, row) for row in hosts)
        unused = 0 if is_new or number < len(first) else unused + 1
        if unused > SCHEDULE_ATTEMPTS:
            return
        if is_new:
            seen.add(schedule)
            yield schedule


def _is_kept(schedule: RelativeSchedule, space: ActionSpace, rules: Rules, steps: int, exists: Tensor) -> bool:
    entries = schedule.germinations(space.present_slots(exists))
    return keeps_every_seed(space, rules, steps, entries, exists.unsqueeze(0))


def _random_relative_schedules(space: ActionSpace, steps: int, rng_seed: int) -> Iterator[RelativeSchedule]:
    blends = next((head.options for head in space.heads if head.name == "blend"), (Blend.ADD.name,))
    index = 0
    while True:
        generator = make_generator("relative schedule", derive_seed("relative schedule", rng_seed, index))

        def draw(count: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(count, (), generator=generator))

        places = PATTERNS[draw(len(PATTERNS))]
        entries = [
            (draw(steps) / steps, place, space.blueprints[draw(len(space.blueprints))], blends[draw(len(blends))])
            for place in places
        ]
        yield RelativeSchedule(tuple(entries))
        index += 1
