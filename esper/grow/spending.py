"""What a training has spent, in FLOPs: training, and measuring seeds."""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from esper.grow.costs import NetworkCosts
from esper.grow.optimizers import SeedGroups
from esper.grow.plan import GrowthPlan


class FlopsSpent:
    """Counts FLOPs.

    Arguments:
        costs, plan: of the network and its seeds
        groups: whose first optimizer counts the batches
        batch: samples of a batch, until `note_batch` is called
        evaluate_samples: samples of a measurement of a seed; None is not known, so measurements are free
        measure_share: largest share of all FLOPs for them
    """

    def __init__(
        self,
        costs: NetworkCosts,
        plan: GrowthPlan,
        groups: SeedGroups,
        *,
        batch: int,
        evaluate_samples: int | None,
        measure_share: float,
    ) -> None:
        self._costs, self._plan, self._groups, self._batch = costs, plan, groups, batch
        self.evaluate_samples, self._measure_share = evaluate_samples, measure_share
        self.total, self._measured = 0.0, 0.0
        self._are_batches_noted = False
        self._slots, self._sample = plan.slots, costs.training_flops(plan.slots, plan.space)  # FLOPs of a sample
        groups.listeners.append(self._count)

    def note_batch(self, samples: int) -> None:
        """Count training samples; from now on, optimizer steps do not count."""
        self._are_batches_noted = True
        self._add(samples)

    def pay_for_measurement(self, seeds: int) -> bool:
        """Charge a measurement of some seeds; False if it costs too much, and is not to be made."""
        if self.evaluate_samples is None:
            return True
        cost = self._measurement(seeds)
        if self._measured + cost > self._measure_share * self.total:
            return False
        self.total, self._measured = self.total + cost, self._measured + cost
        return True

    @property
    def can_measure(self) -> bool:
        """Whether the whole training, at the present pace, pays for measuring one seed once."""
        steps = self._plan.steps / max(1, self._plan.step)
        return self._measurement(1) <= self._measure_share * self.total * steps

    def _measurement(self, seeds: int) -> float:
        samples = self.evaluate_samples or 0
        return self._costs.forward_flops(self._plan.slots, self._plan.space) * samples * (1 + seeds)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "measured": self._measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self._measured = state["total"], state["measured"]

    def _count(self, optimizer: Optimizer) -> None:
        if not self._are_batches_noted and optimizer is self._groups.optimizers[0]:
            self._add(self._batch)

    def _add(self, samples: int) -> None:
        if self._slots is not self._plan.slots:  # they are replaced, never changed
            self._slots = self._plan.slots
            self._sample = self._costs.training_flops(self._slots, self._plan.space)
        self.total += samples * self._sample
