"""The books of a round: what the hosts weigh, what they have cost, and what their seeds started from."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.data import Data
from esper.environment.costs import HostCosts
from esper.environment.host_run import BASE, SLOT, HostRun, HostRunOptions, StepPlan
from esper.flops import Flops
from esper.growth import Mode, SeedSetting, SeedSettings
from esper.hosts import count_parameters
from esper.lifecycle import Blend, Slots, Stage
from esper.observation import HostMeasurements

PARTS = (
    "training",  # of the host and the seeds blended into it
    "isolated",  # the second passes that train seeds behind the host
    "validation",
    "probes",  # validation with a seed switched off
)


class CostAccounting:
    """Kept in the main thread, for all environments of a round; `costs` are those of each, of hosts with like slots."""

    def __init__(
        self,
        runs: Sequence[HostRun],
        costs: Sequence[HostCosts],
        data: Data,
        slots: tuple[str, ...],
        options: HostRunOptions,
    ) -> None:
        self._runs, self._costs, self._data, self._slots, self._options = runs, costs, data, slots, options
        self.host_parameters = torch.tensor([float(count_parameters(run.model.host)) for run in runs])
        self.spent = {part: torch.zeros(len(runs), dtype=torch.float64) for part in PARTS}  # FLOPs [envs]
        self._born = torch.full((len(runs), len(slots)), torch.nan)  # score when each seed germinated

    def charge_step(self, env: int, plan: StepPlan) -> None:
        """Charge a step's training, its validation and its probes."""
        seeds, costs, options = self._seed_costs(env), self._costs[env], self._options
        trained, validated = options.batch * plan.batches, self._data.size("validation")
        probed = min(validated, options.probes(validated) * options.validation_batch)
        self.spent["training"][env] += costs.train(seeds, plan.settings) * trained
        self.spent["isolated"][env] += costs.isolated(seeds, plan.settings) * trained
        self.spent["validation"][env] += costs.forward(seeds, plan.final) * validated
        self.spent["probes"][env] += costs.probe(seeds, plan.final, plan.off) * probed

    def charge_validation(self, env: int, settings: SeedSettings) -> None:
        """Charge a validation on its own."""
        flops = self._costs[env].forward(self._seed_costs(env), settings) * self._data.size("validation")
        self.spent["validation"][env] += flops

    def note_germination(self, where: Tensor, score: Tensor) -> None:
        """Note the score [envs] from which new seeds, bool [envs, slots], start."""
        self._born = torch.where(where, score.unsqueeze(1), self._born)

    def note_removal(self, where: Tensor) -> None:
        self._born = torch.where(where, torch.nan, self._born)

    def seed_parameters(self) -> Tensor:
        """Of the seeds that are there now: [envs, slots]."""
        models = [run.model.seeds for run in self._runs]
        counts = [[count_parameters(seeds[n]) if n in seeds else 0 for n in self._slots] for seeds in models]
        return torch.tensor(counts, dtype=torch.float32)

    def measured(self, vector: Tensor, slots: Slots, committed: bool) -> HostMeasurements:
        """Unpack what the runs measured, [envs, figures]; with `committed`, only fossils count as parameters."""
        base = dict(zip(BASE, vector[:, : len(BASE)].unbind(1), strict=True))
        by_slot = vector[:, len(BASE) :].view(len(vector), -1, len(SLOT))
        columns = [self._costs[0].slots.index(name) for name in self._slots]
        slot = {name: by_slot[:, columns, index] for index, name in enumerate(SLOT)}
        score = self._data.score("validation", base["loss"], base["accuracy"])
        counted = slots.stage == Stage.FOSSILIZED if committed else slots.occupied
        return HostMeasurements(
            **base,
            score=score,
            parameters=self.host_parameters + (self.seed_parameters() * counted).sum(1),
            flops=self._flops,
            contribution=slot["contribution"],
            progress=score.unsqueeze(1) - self._born,
            seed_gradient_norm=slot["gradient_norm"],
            seed_health=slot["health"],
            isolated_gain=slot["isolated_gain"],
        )

    @property
    def _flops(self) -> Tensor:
        return torch.stack([self.spent[part] for part in PARTS]).sum(0)

    def _seed_costs(self, env: int) -> dict[str, Flops]:
        model = self._runs[env].model
        seeds = {name: model.seed(name) for name in model.seeds}
        return {name: self._costs[env].seed(name, seed.blueprint, seed.blend) for name, seed in seeds.items()}


def batches_for(
    flops: float, fossils: Mapping[str, tuple[str, str]], costs: HostCosts, *, steps: int, batch: int, validated: int
) -> int:
    """How many batches to train on so that an episode costs as near to `flops` as whole ones allow; at least 1.

    `fossils`, slot -> blueprint and blend by name, are there from the start; nothing else grows and nothing is probed.
    """
    seeds = {slot: costs.seed(slot, name, Blend[blend]) for slot, (name, blend) in fossils.items()}
    settings = {slot: SeedSetting(Mode.BLENDED, 1.0) for slot in fossils}
    validations = (steps + 1) * validated * costs.forward(seeds, settings)  # before the first step, and after each
    return max(1, round((flops - validations) / (batch * costs.train(seeds, settings))))
