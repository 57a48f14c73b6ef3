"""What happened in each step of a growth."""

from collections.abc import Mapping, Sequence
from typing import Any

from esper.grow.plan import GrowthPlan
from esper.grow.structure import StructureChange


class GrowthHistory:
    """A record for each step: results, the decision, and events in words.

    Arguments:
        plan: of the growth
    """

    def __init__(self, plan: GrowthPlan) -> None:
        self._plan = plan
        self.records: list[dict[str, Any]] = []

    def add(self, rolled_back: str | None, flops: float) -> None:
        """Begin the record of a step."""
        events = [] if rolled_back is None else [f"rolled back {rolled_back}"]
        self.records.append(self._plan.record() | {"flops": flops, "events": events})

    def note_decision(self, decision: Mapping[str, str]) -> None:
        """Add a decision to the record of this step."""
        self.records[-1] |= decision

    def note_change(self, change: StructureChange) -> None:
        """Add the events of a change to the record of this step."""
        if self.records:
            seeds = self._plan.seeds
            self.records[-1]["events"] += [f"planted {seeds[slot].blueprint} in {slot}" for slot in change.added]
            self.records[-1]["events"] += [f"removed the seed in {slot}" for slot in change.removed]

    def state_dict(self) -> list[dict[str, Any]]:
        return [{**record, "events": list(record["events"])} for record in self.records]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        self.records[:] = [{**record, "events": list(record["events"])} for record in state]
