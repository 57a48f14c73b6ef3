"""How an episode begins, where it is not the usual way: with seeds that are there from the start, or a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from esper.lifecycle import ActionSpace, Blend, Slots, Stage


@dataclass(frozen=True)
class EpisodeStart:
    """The usual way is an empty host that trains on as many batches in each step as the environment says."""

    fossils: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # slot -> blueprint and blend, by name
    batches: int | None = None  # of the whole episode; None is the usual number in each step
    frozen: bool = False  # whether these fossils stay as they are born, which is the identity

    def to_dict(self) -> dict[str, Any]:
        """What is not as usual, as plain data."""
        return {key: value for key, value in asdict(self).items() if value != getattr(USUAL, key)}

    def batches_in_step(self, step: int, steps: int, usual: int) -> int:
        """Batches of one step; those of an episode with a number of its own are spread evenly, none is lost."""
        if self.batches is None:
            return usual
        return self.batches * (step + 1) // steps - self.batches * step // steps


USUAL = EpisodeStart()


def initial_slots(starts: Sequence[EpisodeStart], space: ActionSpace) -> Slots:
    """The slots with which such episodes begin."""
    slots = Slots.empty(len(starts), len(space.slots))
    for env, start in enumerate(starts):
        for name, (blueprint, blend) in start.fossils.items():
            if name not in space.slots or blueprint not in space.blueprints or blend not in Blend.__members__:
                raise ValueError(f"fossils: {blueprint} in {name}, blended by {blend}, does not exist in this space.")
            here = torch.zeros_like(slots.live)
            here[env, space.slots.index(name)] = True
            slots = slots.where(
                here,
                stage=int(Stage.FOSSILIZED),
                blueprint=space.blueprints.index(blueprint),
                blend=int(Blend[blend]),
                alpha=1.0,
                alpha_start=1.0,
                alpha_target=1.0,
            )
    return slots
