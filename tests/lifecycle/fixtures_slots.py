"""Action spaces, rules and random legal episodes, for property tests."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from esper.config import load_preset
from esper.lifecycle import ActionSpace, Events, Gate, Masks, Rules, SeedMeasurements, Slots, apply, commit, legal, tick

BLUEPRINTS = ("norm", "conv_light", "attention")


@cache
def space(actions: str = "core", slots: int = 3, ops: tuple[str, ...] | None = None) -> ActionSpace:
    changes = {} if ops is None else {"ops": ops}
    names = [f"block{index + 1}" for index in range(slots)]
    return load_preset(f"actions/{actions}", slots=names, blueprints=BLUEPRINTS, **changes)


def rules(
    steps: int = 10,
    health: float | None = None,
    contribution: float | None = None,
    dwell: int | None = None,
    prune_age: int | None = None,
    cooldown: int | None = 3,
    max_live: int | None = None,
    keep: Literal["explicit", "auto"] = "explicit",
    ramp: int | None = None,
) -> Rules:
    gates = {
        "germinated": Gate(dwell=0),
        "training": Gate(dwell=dwell, health=health),
        "blending": Gate(dwell=dwell, full_alpha=True),
        "holding": Gate(dwell=dwell, health=health, contribution=contribution),
    }
    durations = {"prune_age": prune_age, "cooldown": cooldown, "ramp": ramp}
    return Rules(steps=steps, gates=gates, max_live=max_live, commit=keep, **durations)


@cache
def quick(**changes: object) -> Rules:
    """The rules of conf/lifecycle/quick.yaml."""
    return load_preset("lifecycle/quick", steps=20, **changes)


def act(space: ActionSpace, *choices: dict[str, str]) -> Tensor:
    """An action from option names, a dict for each environment; other heads take their first option."""
    return torch.tensor(
        [
            [head.options.index(choice[head.name]) if head.name in choice else 0 for head in space.heads]
            for choice in choices
        ]
    )


def random_action(masks: Masks, space: ActionSpace, generator: torch.Generator) -> Tensor:
    """A legal action for every environment; all legal ops are equally likely."""

    def draw(mask: Tensor) -> Tensor:
        return torch.multinomial(mask.float(), 1, generator=generator).squeeze(1)

    op = draw(masks.op)
    columns = [op]
    for head in space.heads[1:]:
        mask = masks.under(head.name, op)
        columns.append(draw(mask | ~mask.any(1, keepdim=True)))  # an op that uses no slot may have any
    return torch.stack(columns, 1)


def random_measurements(slots: Slots, generator: torch.Generator) -> SeedMeasurements:
    def draw(low: float, high: float) -> Tensor:
        value = low + (high - low) * torch.rand(slots.alpha.shape, generator=generator)
        return torch.where(torch.rand(slots.alpha.shape, generator=generator) < 0.3, torch.nan, value)

    return SeedMeasurements(contribution=draw(-2, 2), health=draw(0, 1))


@dataclass
class Transition:
    """Input and output of one call of apply, commit or tick."""

    call: str
    before: Slots
    after: Slots
    events: Events
    action: Tensor


def play(
    space: ActionSpace, rules: Rules, *, envs: int, steps: int, seed: int, exists: Tensor | None = None
) -> Iterator[Transition]:
    """Random legal episodes of `steps` steps, with a commit in the last; `seed` is a random seed."""
    generator = torch.Generator().manual_seed(seed)
    slots = Slots.empty(envs, len(space.slots), exists=exists)
    for step in range(steps):
        action = random_action(legal(slots, space, rules), space, generator)
        after, events = apply(slots, action, space, rules)
        yield Transition("apply", slots, after, events, action)
        if step + 1 == steps:
            applied = after
            after, events = commit(applied, rules)
            yield Transition("commit", applied, after, events, action)
        slots, events = tick(after, random_measurements(after, generator), space, rules)
        yield Transition("tick", after, slots, events, action)
