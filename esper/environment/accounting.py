"""Accounting of a round: parameters, FLOPs spent, and the score at which each seed germinated."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.data import Data
from esper.environment.costs import HostCosts
from esper.environment.host_run import HOST_VALUES, SLOT_VALUES, HostRunOptions, StepPlan
from esper.flops import Flops
from esper.growth import Mode, SeedSetting, SeedSettings
from esper.lifecycle import ActionSpace, Blend, Slots, Stage
from esper.observation import HostMeasurements

PARTS = (
    "training",  # host and blended seeds
    "isolated",  # second passes that train isolated seeds
    "validation",
    "probes",  # validation passes with a seed switched off
)


class CostAccounting:
    """Parameters and FLOPs of all environments of a round, from the slots and the known costs of hosts and seeds.

    Arguments:
        costs: parameters, and FLOPs per sample, of each environment's host; all hosts have the same slots
        data: the data set
        space: the action space, with the names of slots and blueprints
        options: how a step trains and measures
    """

    def __init__(self, costs: Sequence[HostCosts], data: Data, space: ActionSpace, options: HostRunOptions) -> None:
        self._costs, self._data, self._space, self._options = costs, data, space, options
        self.host_parameters = torch.tensor([float(each.parameters) for each in costs])
        self.flops_by_part = {part: torch.zeros(len(costs), dtype=torch.float64) for part in PARTS}  # [envs]
        self._start_score = torch.full((len(costs), len(space.slots)), torch.nan)  # score when each seed germinated

    def charge_step(self, env: int, plan: StepPlan, slots: Slots) -> None:
        """Charge the training, validation and probes of a step."""
        seeds, costs, options = self._seed_costs(env, slots), self._costs[env], self._options
        flops = self.flops_by_part
        train_samples, validation_samples = options.batch * plan.batches, self._data.size("validation")
        flops["training"][env] += costs.train(seeds, plan.settings) * train_samples
        flops["isolated"][env] += costs.isolated(seeds, plan.settings) * train_samples
        if plan.measure:
            flops["validation"][env] += costs.forward(seeds, plan.final) * validation_samples
            flops["probes"][env] += costs.probe(seeds, plan.final, plan.off) * options.probes(validation_samples)

    def charge_validation(self, env: int, settings: SeedSettings, slots: Slots) -> None:
        """Charge one validation pass without training."""
        flops = self._costs[env].forward(self._seed_costs(env, slots), settings) * self._data.size("validation")
        self.flops_by_part["validation"][env] += flops

    def note_germination(self, where: Tensor, score: Tensor) -> None:
        """Record the current score [envs] for the slots in `where`, bool [envs, slots], that germinate a seed."""
        self._start_score = torch.where(where, score.unsqueeze(1), self._start_score)

    def note_removal(self, where: Tensor) -> None:
        """Forget the score of the slots in `where`, bool [envs, slots], whose seed is removed."""
        self._start_score = torch.where(where, torch.nan, self._start_score)

    def seed_parameters(self, slots: Slots) -> Tensor:
        """Parameters of the seeds: [envs, slots]; 0 without a seed."""
        counts = torch.zeros(slots.stage.shape)
        for env, costs in enumerate(self._costs):
            for slot, seed in self._seeds(env, slots).items():
                counts[env, self._space.slots.index(slot)] = costs.seed_parameters(slot, *seed)
        return counts

    def unpack_measurements(self, vector: Tensor, slots: Slots, only_fossils: bool) -> HostMeasurements:
        """Unpack the measurements of the runs, [envs, values]; `only_fossils` counts no parameters of live seeds."""
        base = dict(zip(HOST_VALUES, vector[:, : len(HOST_VALUES)].unbind(1), strict=True))
        by_slot = vector[:, len(HOST_VALUES) :].view(len(vector), -1, len(SLOT_VALUES))
        columns = [self._costs[0].slots.index(name) for name in self._space.slots]
        slot = {name: by_slot[:, columns, index] for index, name in enumerate(SLOT_VALUES)}
        score = self._data.score("validation", base["loss"], base["accuracy"])
        counted = slots.stage == Stage.FOSSILIZED if only_fossils else slots.occupied
        return HostMeasurements(
            **base,
            score=score,
            parameters=self.host_parameters + (self.seed_parameters(slots) * counted).sum(1),
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

    def _seeds(self, env: int, slots: Slots) -> dict[str, tuple[str, Blend]]:
        """The blueprint and blend of each seed of an environment, by slot."""
        space, columns = self._space, slots.occupied[env].nonzero().flatten().tolist()
        return {
            space.slots[column]: (
                space.blueprints[int(slots.blueprint[env, column])],
                Blend(int(slots.blend[env, column])),
            )
            for column in columns
        }

    def _seed_costs(self, env: int, slots: Slots) -> dict[str, Flops]:
        return {slot: self._costs[env].seed(slot, *seed) for slot, seed in self._seeds(env, slots).items()}


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
