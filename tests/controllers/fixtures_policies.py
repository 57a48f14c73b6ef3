"""Policies, and random inputs and masks for them."""

from typing import Any

import torch

from esper.config import load_preset
from esper.controllers import Policy
from esper.lifecycle import Layout, Masks
from esper.observation import PolicyInputs
from esper.rng import seeded_init
from tests.lifecycle.fixtures_slots import space

BASE, SLOT = 6, 4  # features


def layout(actions: str = "core", slots: int = 3) -> Layout:
    return Layout.from_space(space(actions, slots), BASE, SLOT)


def policy(spec: Layout | None = None, rng_seed: int = 0, **changes: Any) -> Policy:
    with seeded_init(rng_seed):
        built: Policy = load_preset("policy/lstm", layout=spec or layout(), **{"hidden": 16, **changes})
    return built


def random_masks(spec: Layout, count: int, draws: torch.Generator) -> Masks:
    """Masks [count, ...] that the lifecycle could produce: an op is legal where one of its slots is."""

    def flip_coins(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draws) < 0.5

    uses = (
        spec.uses()[:, list(spec.options).index("slot")]
        if "slot" in spec.options
        else torch.zeros(len(spec.ops)).bool()
    )
    slot = flip_coins(count, len(spec.ops), len(spec.slots)) & uses[:, None]
    op = slot.any(-1)
    op[:, spec.ops.index("WAIT")] = True
    others = {}
    for head, options in spec.options.items():
        if head not in ("op", "slot"):
            others[head] = flip_coins(count, len(options))
            others[head][:, 0] |= ~others[head].any(-1)
    return Masks(op, slot, others)


def random_inputs(spec: Layout, count: int, draws: torch.Generator) -> PolicyInputs:
    return PolicyInputs(
        torch.randn(count, spec.base, generator=draws),
        torch.randn(count, len(spec.slots), spec.slot, generator=draws),
        torch.randint(0, len(spec.blueprints) + 1, (count, len(spec.slots)), generator=draws),
        torch.ones(count, len(spec.slots), dtype=torch.bool),
        random_masks(spec, count, draws),
    )


def draws(rng_seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(rng_seed)
