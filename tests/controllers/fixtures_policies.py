"""Policies, inputs and masks for the tests of what learns."""

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


def policy(of: Layout | None = None, seed: int = 0, **changes: Any) -> Policy:
    with seeded_init(seed):
        made: Policy = load_preset("policy/lstm", layout=of or layout(), **{"hidden": 16, **changes})
    return made


def random_masks(of: Layout, count: int, draws: torch.Generator) -> Masks:
    """Masks [count, ...] as the lifecycle could give them: an op is legal where one of its slots is."""

    def coins(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draws) < 0.5

    uses = of.uses()[:, list(of.options).index("slot")] if "slot" in of.options else torch.zeros(len(of.ops)).bool()
    slot = coins(count, len(of.ops), len(of.slots)) & uses[:, None]
    op = slot.any(-1)
    op[:, of.ops.index("WAIT")] = True
    others = {}
    for head, options in of.options.items():
        if head not in ("op", "slot"):
            others[head] = coins(count, len(options))
            others[head][:, 0] |= ~others[head].any(-1)
    return Masks(op, slot, others)


def random_inputs(of: Layout, count: int, draws: torch.Generator) -> PolicyInputs:
    return PolicyInputs(
        torch.randn(count, of.base, generator=draws),
        torch.randn(count, len(of.slots), of.slot, generator=draws),
        torch.randint(0, len(of.blueprints) + 1, (count, len(of.slots)), generator=draws),
        random_masks(of, count, draws),
    )


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
