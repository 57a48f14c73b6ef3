"""The start of an episode: initial fossils and a number of batches."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from esper.lifecycle import ActionSpace, Blend, Slots, Stage


@dataclass(frozen=True)
class EpisodeStart:
    """How an episode starts. By default: no seeds, and `environment.batches` batches in each step."""

    fossils: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # slot -> (blueprint, blend)
    batches: int | None = None  # of the whole episode; None is environment.batches in each step
    frozen: bool = False  # whether the fossils are not trained; a new seed is the identity, so they stay the identity

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the default, as plain data."""
        return {key: value for key, value in asdict(self).items() if value != getattr(DEFAULT_START, key)}

    def batches_in_step(self, step: int, steps: int, default: int) -> int:
        """Batches of one step. `batches`, if set, is spread evenly over the steps; else `default`."""
        if self.batches is None:
            return default
        return self.batches * (step + 1) // steps - self.batches * step // steps


DEFAULT_START = EpisodeStart()


def initial_slots(starts: Sequence[EpisodeStart], space: ActionSpace) -> Slots:
    """The slots at the start of each episode."""
    slots = Slots.empty(len(starts), len(space.slots))
    for env, start in enumerate(starts):
        for name, (blueprint, blend) in start.fossils.items():
            if name not in space.slots or blueprint not in space.blueprints or blend not in Blend.__members__:
                raise ValueError(
                    f"fossils: {blueprint} in {name} with blend {blend} does not exist; must have a slot of "
                    f"{', '.join(space.slots)}, a blueprint of {', '.join(space.blueprints)} and a blend of "
                    f"{', '.join(Blend.__members__)}."
                )
            where = torch.zeros_like(slots.live)
            where[env, space.slots.index(name)] = True
            slots = slots.where(
                where,
                stage=int(Stage.FOSSILIZED),
                blueprint=space.blueprints.index(blueprint),
                blend=int(Blend[blend]),
                alpha=1.0,
                alpha_start=1.0,
                alpha_target=1.0,
            )
    return slots
