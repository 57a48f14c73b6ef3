"""Plans: growth that is decided before an episode starts, and the candidates that searches choose from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from esper.controllers import Controller, NoGrowth, ScheduleController, ScheduleEntry, keeps_every_seed, random_schedule
from esper.environment import EpisodeStart
from esper.evaluation.runner import PLAN_PREFIX, digest
from esper.lifecycle import ActionSpace, Blend, Rules
from esper.rng import derive_seed, make_generator

MOMENTS = (0.0, 0.1, 0.25, 0.5, 0.75)  # shares of the episode at which grow_once and net2net may grow
FIRST_MOMENTS = (0.0, 0.25, 0.5)  # of the first schedules that best_open_loop tries
SCHEDULE_ATTEMPTS = 200  # random schedules in a row that may be invalid or known before there are no others


@dataclass(frozen=True)
class Plan:
    """How an episode starts, and what germinates in it.

    Arguments:
        start: fossils, host and moment of growth
        schedule: germinations
    """

    start: EpisodeStart
    schedule: tuple[ScheduleEntry, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        entries = {"schedule": [asdict(entry) for entry in self.schedule]} if self.schedule else {}
        return {**self.start.to_dict(), **entries}

    @property
    def digest(self) -> str:
        """Equal plans run equal episodes, in any arm."""
        return f"{PLAN_PREFIX}{digest(self.to_dict())}"

    def controller(self, space: ActionSpace, rules: Rules) -> Controller[Any]:
        return ScheduleController(space, self.schedule, rules=rules) if self.schedule else NoGrowth(space)

    def describe(self, steps: int) -> str:
        """In a few words, for the report; `steps` are the decisions of an episode."""
        start = self.start
        parts = [f"host {start.host}"] if start.host else []
        by_blueprint: dict[str, list[str]] = {}
        for slot, (blueprint, _) in start.fossils.items():
            by_blueprint.setdefault(blueprint, []).append(slot)
        parts += [f"{blueprint} in {', '.join(slots)}" for blueprint, slots in by_blueprint.items()]
        if start.widen:
            parts.append(f"widened to {start.widen}")
        moment = f" at {start.at:g} of the budget" if start.at or start.widen else ""
        together: dict[tuple[float, str, str], list[str]] = {}  # slots by moment, blueprint and blend
        for entry in sorted(self.schedule, key=lambda entry: _share(entry.at, steps)):
            together.setdefault((_share(entry.at, steps), entry.blueprint[0], entry.blend), []).append(entry.slot)
        entries = [
            f"{blueprint} in {', '.join(slots)} at {share:.2g}"
            + (f", blended by {blend}" if blend != Blend.ADD.name else "")
            for (share, blueprint, blend), slots in together.items()
        ]
        rate = f"learning rates x {start.lr_scale:g}" if start.lr_scale != 1 else ""
        growth = "; ".join([*([", ".join(parts) + moment] if parts else []), *entries])
        return "; ".join(part for part in (growth or "no growth", rate) if part)

    def within(self, slots: Sequence[str]) -> "Plan":
        """The plan in a host with these slots, so that plans with equal results there are equal."""
        fossils = {slot: self.start.fossils[slot] for slot in slots if slot in self.start.fossils}
        schedule = tuple(entry for entry in self.schedule if entry.slot in slots)
        return replace(self, start=replace(self.start, fossils=fossils), schedule=schedule)

    def with_lr_scale(self, scale: float) -> "Plan":
        return replace(self, start=replace(self.start, lr_scale=scale))


def _share(at: float, steps: int) -> float:
    """A moment of a schedule as a share of the episode."""
    return at if at < 1 else at / steps


def first_blueprint(names: Sequence[str], space: ActionSpace) -> str:
    """The first of some blueprints that the action space has, else the first of the action space."""
    return next((name for name in names if name in space.blueprints), space.blueprints[0])


def fill(space: ActionSpace, blueprint: str) -> dict[str, tuple[str, str]]:
    """Fossils of one blueprint in every slot; an episode has those of its own host."""
    return dict.fromkeys(space.slots, (blueprint, Blend.ADD.name))


def static_plans(
    space: ActionSpace,
    variants: Sequence[str],
    blueprint: str,
    rng_seed: int,
    start: EpisodeStart,
    own_slots: Sequence[str] | None = None,
) -> Iterator[Plan]:
    """Networks without growth: obvious ones first, then every other assignment of blueprints in random order.

    Arguments:
        space: slots and blueprints
        variants: of the host, such as a wider one
        blueprint: that is tried first
        rng_seed: of the random order
        start: what all plans have in common
        own_slots: of the host; None is all slots
    """
    slots, blueprints = space.slots if own_slots is None else own_slots, space.blueprints
    assignments: list[Mapping[str, str]] = [dict.fromkeys(slots, blueprint), {}]
    others = [dict.fromkeys(slots, name) for name in blueprints if name != blueprint]
    obvious = [replace(start, fossils=_fossils(assignment)) for assignment in assignments]
    wider = [replace(start, host=name) for name in variants]
    whole = [replace(start, fossils=_fossils(assignment)) for assignment in others]
    first = [Plan(one) for one in chain(obvious, _alternate(wider, whole))]
    seen = {plan.digest for plan in first}
    yield from first
    options = (None, *blueprints)
    count = len(options) ** len(slots)
    order = _permutation(count, rng_seed)
    for number in order:
        names = _digits(number, options, len(slots))
        assignment = {slot: name for slot, name in zip(slots, names, strict=True) if name is not None}
        plan = Plan(replace(start, fossils=_fossils(assignment)))
        if plan.digest not in seen:
            yield plan


def _fossils(assignment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {slot: (blueprint, Blend.ADD.name) for slot, blueprint in assignment.items()}


def _alternate(first: Sequence[EpisodeStart], second: Sequence[EpisodeStart]) -> Iterator[EpisodeStart]:
    """One of each in turn, then what is left of the longer one."""
    for index in range(max(len(first), len(second))):
        yield from (*first[index : index + 1], *second[index : index + 1])


def _permutation(count: int, rng_seed: int) -> Iterator[int]:
    """The numbers below `count` in random order; many are drawn one by one, so that none of them needs a list."""
    generator = make_generator("static plans", rng_seed)
    if count <= 1 << 20:
        yield from torch.randperm(count, generator=generator).tolist()
        return
    seen: set[int] = set()
    while len(seen) < count:
        number = _draw_below(count, generator)
        if number not in seen:
            seen.add(number)
            yield number


def _draw_below(count: int, generator: torch.Generator) -> int:
    """A random number below `count`, which may be larger than what torch draws: many slots have many assignments."""
    limit = 1 << 62
    number = int(torch.randint(min(count, limit), (), generator=generator))
    if count <= limit:
        return number
    return (number * limit + int(torch.randint(limit, (), generator=generator))) % count


def _digits(number: int, options: Sequence[str | None], slots: int) -> list[str | None]:
    """The assignment with a number: its digits in the base of the options."""
    digits = []
    for _ in range(slots):
        number, digit = divmod(number, len(options))
        digits.append(options[digit])
    return digits


def schedule_plans(
    space: ActionSpace,
    rules: Rules,
    steps: int,
    blueprint: str,
    rng_seed: int,
    start: EpisodeStart,
    exists: Tensor | None = None,
) -> Iterator[Plan]:
    """Schedules whose seeds can all be kept: sensible ones first, then random ones without repetition.

    Arguments:
        space, rules, steps: of the episode
        blueprint: of the first schedules
        rng_seed: of the random schedules
        start: of all episodes
        exists: bool [hosts, slots], the slots of each host; None is one host with all slots
    """
    first = [
        [ScheduleEntry(at=round(moment * steps), slot=slot, blueprint=[name]) for slot in space.slots]
        for name in dict.fromkeys((blueprint, *space.blueprints))
        for moment in (FIRST_MOMENTS if name == blueprint else FIRST_MOMENTS[1:2])
    ]
    seen: set[str] = set()
    unused = 0
    for number, entries in enumerate(chain(first, _random_schedules(space, steps, rng_seed))):
        plan = Plan(start, tuple(entries))
        is_new = bool(entries) and plan.digest not in seen and keeps_every_seed(space, rules, steps, entries, exists)
        unused = 0 if is_new or number < len(first) else unused + 1
        if unused > SCHEDULE_ATTEMPTS:
            return
        if is_new:
            seen.add(plan.digest)
            yield plan


def _random_schedules(space: ActionSpace, steps: int, rng_seed: int) -> Iterator[list[ScheduleEntry]]:
    index = 0
    while True:
        yield random_schedule(space, steps, derive_seed("valid schedule", rng_seed, index))
        index += 1
