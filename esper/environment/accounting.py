"""Accounting of a round: parameters, FLOPs spent, and the score at which each seed germinated."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.data import Data
from esper.environment.costs import HostCosts
from esper.environment.host_run import HOST_VALUES, SLOT_VALUES, HostRun, HostRunOptions, StepPlan
from esper.flops import Flops
from esper.growth import Mode, SeedSetting, SeedSettings
from esper.hosts import count_parameters
from esper.lifecycle import Blend, Slots, Stage
from esper.observation import HostMeasurements

PARTS = (
    "training",  # host and blended seeds
    "isolated",  # second passes that train isolated seeds
    "validation",
    "probes",  # validation passes with a seed switched off
)


class CostAccounting:
    """Parameters and FLOPs of all environments of a round. Used from the main thread only.

    Arguments:
        runs: one host run per environment
        costs: FLOPs per sample of each environment's host; all hosts have the same slots
        data: the data set
        slots: names of the slots, in the order of their columns
        options: how a step trains and measures
    """

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
        self.flops_by_part = {part: torch.zeros(len(runs), dtype=torch.float64) for part in PARTS}  # [envs]
        self._start_score = torch.full((len(runs), len(slots)), torch.nan)  # score when each seed germinated

    def charge_step(self, env: int, plan: StepPlan) -> None:
        """Charge the training, validation and probes of a step."""
        seeds, costs, options, flops = self._seed_costs(env), self._costs[env], self._options, self.flops_by_part
        train_samples, validation_samples = options.batch * plan.batches, self._data.size("validation")
        probe_samples = min(validation_samples, options.probes(validation_samples) * options.validation_batch)
        flops["training"][env] += costs.train(seeds, plan.settings) * train_samples
        flops["isolated"][env] += costs.isolated(seeds, plan.settings) * train_samples
        flops["validation"][env] += costs.forward(seeds, plan.final) * validation_samples
        flops["probes"][env] += costs.probe(seeds, plan.final, plan.off) * probe_samples

    def charge_validation(self, env: int, settings: SeedSettings) -> None:
        """Charge one validation pass without training."""
        flops = self._costs[env].forward(self._seed_costs(env), settings) * self._data.size("validation")
        self.flops_by_part["validation"][env] += flops

    def note_germination(self, where: Tensor, score: Tensor) -> None:
        """Record the current score [envs] for the slots in `where`, bool [envs, slots], that germinate a seed."""
        self._start_score = torch.where(where, score.unsqueeze(1), self._start_score)

    def note_removal(self, where: Tensor) -> None:
        """Forget the score of the slots in `where`, bool [envs, slots], whose seed is removed."""
        self._start_score = torch.where(where, torch.nan, self._start_score)

    def seed_parameters(self) -> Tensor:
        """Parameters of the current seeds: [envs, slots]; 0 without a seed."""
        models = [run.model.seeds for run in self._runs]
        counts = [[count_parameters(seeds[n]) if n in seeds else 0 for n in self._slots] for seeds in models]
        return torch.tensor(counts, dtype=torch.float32)

    def unpack_measurements(self, vector: Tensor, slots: Slots, only_fossils: bool) -> HostMeasurements:
        """Unpack the measurements of the runs, [envs, values]; `only_fossils` counts no parameters of live seeds."""
        base = dict(zip(HOST_VALUES, vector[:, : len(HOST_VALUES)].unbind(1), strict=True))
        by_slot = vector[:, len(HOST_VALUES) :].view(len(vector), -1, len(SLOT_VALUES))
        columns = [self._costs[0].slots.index(name) for name in self._slots]
        slot = {name: by_slot[:, columns, index] for index, name in enumerate(SLOT_VALUES)}
        score = self._data.score("validation", base["loss"], base["accuracy"])
        counted = slots.stage == Stage.FOSSILIZED if only_fossils else slots.occupied
        return HostMeasurements(
            **base,
            score=score,
            parameters=self.host_parameters + (self.seed_parameters() * counted).sum(1),
            flops=self.total_flops,
            contribution=slot["contribution"],
            progress=score.unsqueeze(1) - self._start_score,
            seed_gradient_norm=slot["gradient_norm"],
            seed_health=slot["health"],
            isolated_gain=slot["isolated_gain"],
        )

    @property
    def total_flops(self) -> Tensor:
        """float64 [envs]."""
        return torch.stack([self.flops_by_part[part] for part in PARTS]).sum(0)

    def _seed_costs(self, env: int) -> dict[str, Flops]:
        model = self._runs[env].model
        seeds = {name: model.seed(name) for name in model.seeds}
        return {name: self._costs[env].seed(name, seed.blueprint, seed.blend) for name, seed in seeds.items()}


def batches_for(
    flops: float, fossils: Mapping[str, tuple[str, str]], costs: HostCosts, *, steps: int, batch: int, validated: int
) -> int:
    """Number of training batches with which an episode costs about `flops`, at least 1.

    Arguments:
        flops: target of the whole episode
        fossils: seeds that the episode starts with, slot -> (blueprint, blend); no other seed grows, nothing is probed
        costs: FLOPs per sample of the host
        steps: steps of the episode
        batch: samples in a training batch
        validated: samples of the validation split
    """
    seeds = {slot: costs.seed(slot, name, Blend[blend]) for slot, (name, blend) in fossils.items()}
    settings = {slot: SeedSetting(Mode.BLENDED, 1.0) for slot in fossils}
    validations = (steps + 1) * validated * costs.forward(seeds, settings)  # before the first step, and after each
    return max(1, round((flops - validations) / (batch * costs.train(seeds, settings))))
