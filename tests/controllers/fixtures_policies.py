"""Policies, and random inputs and masks for them."""

from collections.abc import Mapping
from typing import Any

import torch

from esper.config import load_preset
from esper.controllers import EpisodeContext, Policy
from esper.controllers.policy import PolicyOutput
from esper.lifecycle import ActionSpace, Layout, Masks
from esper.observation import PolicyInputs
from esper.rng import seeded_init
from tests.lifecycle.fixtures_slots import space

BASE: dict[str, str | None] = {**dict.fromkeys("abcd"), "e": "gradients", "f": "contribution"}  # column -> group
SLOT: dict[str, str | None] = {**dict.fromkeys("uvw"), "x": "contribution"}
CANDIDATE = ("size", "cost", "reach")


def make_layout(space: ActionSpace, base: Mapping[str, str | None] = BASE) -> Layout:
    return Layout.from_space(space, base=base, slot=SLOT, candidate=CANDIDATE)


def layout(actions: str = "core", slots: int = 3) -> Layout:
    return make_layout(space(actions, slots))


def policy(spec: Layout | None = None, rng_seed: int = 0, **changes: Any) -> Policy:
    with seeded_init(rng_seed):
        built: Policy = load_preset("policy/lstm", layout=spec or layout(), **{"hidden": 16, **changes})
    return built


def random_masks(spec: Layout, count: int, draws: torch.Generator) -> Masks:
    """Masks [count, ...] that the lifecycle could produce.

    An op is legal where one of its slots is. In all slots it may be legal where at least two are.
    """

    def flip_coins(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=draws) < 0.5

    uses = (
        spec.uses()[:, list(spec.options).index("slot")]
        if "slot" in spec.options
        else torch.zeros(len(spec.ops)).bool()
    )
    slot = flip_coins(count, len(spec.ops), len(spec.slots)) & uses[:, None]
    op = slot.any(-1)
    if spec.all_slots:
        in_all = (slot.sum(-1) >= 2) & (flip_coins(count, len(spec.ops)) | flip_coins(count, len(spec.ops)))
        slot = torch.cat([slot, in_all.unsqueeze(-1)], -1)
    op[:, spec.ops.index("WAIT")] = True
    others = {}
    for head, options in spec.options.items():
        if head not in ("op", "slot"):
            others[head] = flip_coins(count, len(options))
            others[head][:, 0] |= ~others[head].any(-1)
    return Masks(op, slot, others)


def random_inputs(spec: Layout, count: int, draws: torch.Generator) -> PolicyInputs:
    return PolicyInputs(
        base=torch.randn(count, len(spec.base), generator=draws),
        slots=torch.randn(count, len(spec.slots), len(spec.slot), generator=draws),
        blueprints=torch.randint(0, len(spec.blueprints) + 1, (count, len(spec.slots)), generator=draws),
        masks=random_masks(spec, count, draws),
        exists=torch.ones(count, len(spec.slots), dtype=torch.bool),
        candidates=random_context(spec, count, draws).candidates,
    )


def run_inputs(net: Policy, inputs: PolicyInputs) -> PolicyOutput:
    """The output of the network for one step, with all groups of features and names of blueprints known."""
    envs = len(inputs.base)
    base, slots = net.normalised(inputs, torch.ones(envs, len(net.layout.groups), dtype=torch.bool))
    named = torch.ones(envs, len(net.layout.blueprints), dtype=torch.bool)
    context = EpisodeContext(inputs.exists, inputs.candidates, named)
    output: PolicyOutput = net(base[:, None], slots[:, None], inputs.blueprints[:, None], net.begin(envs), context)
    return output


def random_context(spec: Layout, envs: int, draws: torch.Generator) -> EpisodeContext:
    shape = (envs, len(spec.slots), len(spec.blueprints), len(spec.candidate))
    return EpisodeContext(
        exists=torch.ones(envs, len(spec.slots), dtype=torch.bool),
        candidates=torch.randn(*shape, generator=draws),
        named=torch.ones(envs, len(spec.blueprints), dtype=torch.bool),
    )


def draws(rng_seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(rng_seed)
