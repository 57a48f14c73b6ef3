"""The plan of an episode: fossils that are grafted at a fixed time, the host, and how much is trained and measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.lifecycle import ActionSpace, Blend, Slots, Stage

STEP_ROUNDING = 1e-9  # a share such as 0.15 of 20 steps is step 3


@dataclass(frozen=True)
class EpisodeStart:
    """How an episode starts. By default: no seeds, and the environment's host and clock."""

    fossils: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # slot -> (blueprint, blend); any host's slots
    batches: int | None = None  # of the whole episode; None is environment.batches in each step
    frozen: bool = False  # whether the fossils are not trained; a new seed is the identity, so they stay the identity
    at: float = 0.0  # share of the episode at which the fossils are grafted and the host is widened; 1 is never
    host: str | None = None  # a variant of the host, such as wide2; None is the host itself
    widen: str | None = None  # the variant that the host is widened to, without a change of its function
    measured: bool = True  # under a budget: whether it is validated before its end
    lr_scale: float = 1.0  # factor of all learning rates
    budget: float = 1.0  # share of the environment's budget that this episode has
    controller_flops: int = 0  # FLOPs of a decision

    def __post_init__(self) -> None:
        if not 0 <= self.at <= 1:
            raise ValueError(f"at={self.at}: must be a share of the episode between 0 and 1.")
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget={self.budget}: must be a share of the environment's budget above 0, at most 1.")

    def starts_at(self, steps: int) -> int:
        """The step before which fossils are grafted and the host is widened; `steps` is never."""
        return math.ceil(self.at * steps - STEP_ROUNDING)

    @property
    def final_host(self) -> str | None:
        """The variant of the host at the end of the episode; None is the host itself."""
        return self.widen if self.widen is not None and self.at < 1 else self.host

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the default, as plain data."""
        return {key: value for key, value in asdict(self).items() if value != getattr(DEFAULT_START, key)}

    def batches_in_step(self, step: int, steps: int, default: int) -> int:
        """Batches of one step. `batches`, if set, is spread evenly over the steps; else `default`."""
        if self.batches is None:
            return default
        return self.batches * (step + 1) // steps - self.batches * step // steps


DEFAULT_START = EpisodeStart()


def initial_slots(starts: Sequence[EpisodeStart], space: ActionSpace, exists: Tensor) -> Slots:
    """The slots at the start of each episode; `exists`, bool [envs, slots], is whether its host has them."""
    check_fossils(starts, space)
    empty = Slots.empty(len(starts), len(space.slots), exists=exists)
    return graft_fossils(empty, starts, space, [not start.at for start in starts])[0]


def check_fossils(starts: Sequence[EpisodeStart], space: ActionSpace) -> None:
    """Refuse unknown slots, blueprints and blends."""
    for start in starts:
        for name, (blueprint, blend) in start.fossils.items():
            if name not in space.slots or blueprint not in space.blueprints or blend not in Blend.__members__:
                raise ValueError(
                    f"fossils: {blueprint} in {name} with blend {blend} does not exist; must have a slot of "
                    f"{', '.join(space.slots)}, a blueprint of {', '.join(space.blueprints)} and a blend of "
                    f"{', '.join(Blend.__members__)}."
                )


def graft_fossils(
    slots: Slots, starts: Sequence[EpisodeStart], space: ActionSpace, due: Sequence[bool]
) -> tuple[Slots, Tensor]:
    """Fill slots with the fossils of those episodes that are `due`; also returns where, bool [envs, slots].

    Fossils in slots that a host lacks are skipped, so that one plan fits hosts with different slots.
    """
    new = torch.zeros_like(slots.live)
    for env, start in enumerate(starts):
        for name, (blueprint, blend) in start.fossils.items() if due[env] else ():
            where = torch.zeros_like(new)
            where[env, space.slots.index(name)] = True
            where &= slots.exists
            if (where & slots.occupied).any():
                raise ValueError(f"fossils: slot {name} must be empty at share {start.at} of the episode.")
            slots = slots.where(
                where,
                stage=int(Stage.FOSSILIZED),
                steps_in_stage=0,
                blueprint=space.blueprints.index(blueprint),
                blend=int(Blend[blend]),
                alpha=1.0,
                alpha_start=1.0,
                alpha_target=1.0,
            )
            new |= where
    return slots, new
