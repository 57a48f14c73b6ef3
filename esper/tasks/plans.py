"""Plans that are fixed before an episode starts and fit hosts with any slots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from esper.environment import EpisodeStart
from esper.lifecycle import Blend

PLACES = ("all", "first", "middle", "last", "front", "back")  # front and back: the two halves of a host
PLAN_MOMENTS = (0.0, 0.1, 0.25, 0.5)  # shares of the budget
LEAST_GAIN = 0.3  # points over no growth; growth cannot help on a task whose best plan gains less
SCREENING_MOMENT = 0.1  # late enough for a host that trains, early enough for one that does not


@dataclass(frozen=True)
class FixedPlan:
    """What grows where and when; places are relative, so that it fits hosts with different slots.

    Arguments:
        blueprints: (place, blueprint) for each place that grows; see PLACES
        at: share of the budget at which they are grafted
    """

    blueprints: tuple[tuple[str, str], ...] = ()
    at: float = 0.0

    @property
    def name(self) -> str:
        if not self.blueprints:
            return "none"
        return ", ".join(f"{blueprint} in {place}" for place, blueprint in self.blueprints) + f" at {self.at:g}"

    def by_slot(self, slots: Sequence[str]) -> dict[str, str]:
        """The blueprint of each slot that grows in a host with these slots."""
        return {slot: blueprint for place, blueprint in self.blueprints for slot in slots_in(place, slots)}

    def start(self, slots: Sequence[str]) -> EpisodeStart:
        """The start of an episode whose host has these slots."""
        fossils = {slot: (blueprint, Blend.ADD.name) for slot, blueprint in self.by_slot(slots).items()}
        return EpisodeStart(fossils=fossils, at=self.at, measured=False)

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        return {"blueprints": dict(self.blueprints), "at": self.at}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> "FixedPlan":
        """From plain data."""
        blueprints, at = data["blueprints"], data["at"]
        assert isinstance(blueprints, Mapping)
        assert isinstance(at, int | float)
        return cls(tuple(blueprints.items()), float(at))


def slots_in(place: str, slots: Sequence[str]) -> Sequence[str]:
    """The slots of a host in one of PLACES."""
    half, middle = -(-len(slots) // 2), len(slots) // 2
    places = {
        "all": slots,
        "first": slots[:1],
        "middle": slots[middle : middle + 1],
        "last": slots[-1:],
        "front": slots[:half],
        "back": slots[half:],
    }
    return places[place]


def screening_plans(blueprints: Sequence[str]) -> list[FixedPlan]:
    """No growth, then each blueprint in all slots and in the last one, where a seed is cheapest, at one moment."""
    grown = [FixedPlan(((place, name),), SCREENING_MOMENT) for name in blueprints for place in ("all", "last")]
    return [FixedPlan(), *grown]


def refined_plans(best: str, second: str) -> list[FixedPlan]:
    """Plans near the two best blueprints: the best in all slots at other moments, and both in halves of the host."""
    moments = [FixedPlan((("all", best),), at) for at in PLAN_MOMENTS if at != SCREENING_MOMENT]
    pairs = [
        FixedPlan((("front", front), ("back", back)), SCREENING_MOMENT)
        for front, back in ((best, second), (second, best))
    ]
    return [*moments, *pairs]
