"""Accounting of a round: parameters, FLOPs spent, and the score at which each seed germinated."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper.environment.clock import Spending
from esper.environment.costs import HostCosts
from esper.environment.host_run import HOST_VALUES, SLOT_VALUES, HostRunOptions, StepPlan
from esper.environment.host_task import HostTask
from esper.flops import Flops
from esper.growth import Mode, SeedSetting, SeedSettings
from esper.lifecycle import ActionSpace, Blend, Slots, Stage
from esper.observation import HostMeasurements

PARTS = (
    "training",  # host and blended seeds
    "isolated",  # second passes that train isolated seeds
    "validation",
    "probes",  # validation passes with a seed switched off
    "controller",
)


class CostAccounting:
    """Parameters and FLOPs of all environments of a round, from the slots and the known costs of hosts and seeds.

    Arguments:
        bare: parameters, and FLOPs per sample, of each environment's host as it is configured
        costs: those of the host that each environment starts with, which may be a variant
        tasks: data and batch of each environment
        space: the action space, with the names of slots and blueprints
        options: how a step trains and measures
    """

    def __init__(
        self,
        bare: Sequence[HostCosts],
        costs: Sequence[HostCosts],
        tasks: Sequence[HostTask],
        space: ActionSpace,
        options: HostRunOptions,
    ) -> None:
        self._bare, self._costs, self._space, self._options = bare, list(costs), space, options
        self.tasks = tasks
        self.host_parameters = torch.tensor([float(each.parameters) for each in bare])
        self.flops_by_part = {part: torch.zeros(len(costs), dtype=torch.float64) for part in PARTS}  # [envs]
        self.batches = [0] * len(costs)  # training batches of each environment so far
        empty = torch.full((len(costs), len(space.slots)), torch.nan)
        self._start_score = empty  # score when each seed germinated
        self._loss_contribution = empty  # the latest measurement of each seed

    @property
    def samples(self) -> int:
        """Training samples of all environments so far."""
        return sum(count * task.batch for count, task in zip(self.batches, self.tasks, strict=True))

    def score(self, split: str, loss: Tensor, accuracy: Tensor) -> Tensor:
        """The score of each environment on a split of its data; all are [envs]."""
        pairs = zip(self.tasks, loss, accuracy, strict=True)
        return torch.stack([task.data.score(split, *values) for task, *values in pairs])

    def replace_host(self, env: int, costs: HostCosts) -> None:
        """Use the costs of another host from now on."""
        self._costs[env] = costs

    def bare_batch_flops(self, env: int) -> float:
        """FLOPs of a training batch of the configured host without seeds."""
        return float(self._bare[env].train({}, {}) * self.tasks[env].batch)

    def spending(self, env: int, plan: StepPlan, slots: Slots, budget: float, samples: int) -> Spending:
        """What an environment has spent, and what a batch and a measurement of `samples` samples of a plan cost."""
        spent = {part: float(flops[env]) for part, flops in self.flops_by_part.items()}
        batch = sum(self._train_flops(env, plan, slots)) * self.tasks[env].batch
        measurement = sum(self._measurement_flops(env, plan, slots, samples))
        measured = spent["validation"] + spent["probes"]
        return Spending(budget, sum(spent.values()), measured, float(batch), float(measurement))

    def charge_controller(self, env: int, flops: int) -> None:
        """Charge one decision."""
        self.flops_by_part["controller"][env] += flops

    def charge_step(self, env: int, plan: StepPlan, slots: Slots, *, measurement: bool = True) -> None:
        """Charge the training of a step, and its validation and probes unless `measurement` is false."""
        flops, samples = self.flops_by_part, self.tasks[env].batch * plan.batches
        self.batches[env] += plan.batches
        for part, cost in zip(("training", "isolated"), self._train_flops(env, plan, slots), strict=True):
            flops[part][env] += cost * samples
        if plan.measure and measurement:
            size = self.tasks[env].data.size("validation")
            validated = size if plan.samples is None else min(size, plan.samples)
            costs = self._measurement_flops(env, plan, slots, validated)
            for part, cost in zip(("validation", "probes"), costs, strict=True):
                flops[part][env] += cost

    def _train_flops(self, env: int, plan: StepPlan, slots: Slots) -> tuple[int, int]:
        """Training and isolated passes of one sample."""
        seeds, costs = self._seed_costs(env, slots), self._costs[env]
        return costs.train(seeds, plan.settings), costs.isolated(seeds, plan.settings)

    def _measurement_flops(self, env: int, plan: StepPlan, slots: Slots, samples: int) -> tuple[int, int]:
        """Validation and probes after a step."""
        seeds, costs = self._seed_costs(env, slots), self._costs[env]
        probes = costs.probe(seeds, plan.final, plan.off) * self._options.probes(samples)
        return costs.forward(seeds, plan.final) * samples, probes

    def charge_validation(self, env: int, settings: SeedSettings, slots: Slots, samples: int) -> None:
        """Charge one validation pass without training."""
        flops = self._costs[env].forward(self._seed_costs(env, slots), settings) * samples
        self.flops_by_part["validation"][env] += flops

    def relative_costs(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """FLOPs that training on one sample costs, relative to the host without seeds.

        All seeds count as blended: of the whole network [envs], and of each seed [envs, slots].
        """
        by_slot = torch.zeros(slots.stage.shape)
        network = torch.zeros(len(self._costs))
        for env, (bare, costs) in enumerate(zip(self._bare, self._costs, strict=True)):
            unit = bare.train({}, {})
            network[env] = costs.train({}, {}) / unit
            for slot, cost in self._seed_costs(env, slots).items():
                by_slot[env, self._space.slots.index(slot)] = cost.total / unit
        return network + by_slot.sum(1), by_slot

    def note_germination(self, where: Tensor, score: Tensor) -> None:
        """Record the current score [envs] for the slots in `where`, bool [envs, slots], that germinate a seed."""
        self._start_score = torch.where(where, score.unsqueeze(1), self._start_score)

    def note_removal(self, where: Tensor) -> None:
        """Forget the score of the slots in `where`, bool [envs, slots], whose seed is removed."""
        self._start_score = torch.where(where, torch.nan, self._start_score)
        self._loss_contribution = torch.where(where, torch.nan, self._loss_contribution)

    def seed_parameters(self, slots: Slots) -> Tensor:
        """Parameters of the seeds: [envs, slots]; 0 without a seed."""
        counts = torch.zeros(slots.stage.shape)
        for env, costs in enumerate(self._costs):
            for slot, seed in self._seeds(env, slots).items():
                counts[env, self._space.slots.index(slot)] = costs.seed_parameters(slot, *seed)
        return counts

    def unpack_measurements(
        self, vector: Tensor, slots: Slots, only_fossils: bool, measured: Tensor | None = None
    ) -> HostMeasurements:
        """Unpack the measurements of the runs, [envs, values].

        Arguments:
            vector: results of `HostRun.train_and_measure` or `HostRun.measure`
            slots: during the step
            only_fossils: count no parameters of live seeds
            measured: bool [envs], false where values of an earlier measurement were returned; None is all true
        """
        base = dict(zip(HOST_VALUES, vector[:, : len(HOST_VALUES)].unbind(1), strict=True))
        by_slot = vector[:, len(HOST_VALUES) :].view(len(vector), -1, len(SLOT_VALUES))
        slot = {name: by_slot[..., index] for index, name in enumerate(SLOT_VALUES)}
        if measured is not None:
            for name in ("contribution", "loss_contribution"):
                slot[name] = torch.where(measured.unsqueeze(1), slot[name], torch.nan)
        latest = slot["loss_contribution"]
        self._loss_contribution = torch.where(latest.isnan(), self._loss_contribution, latest)
        score = self.score("validation", base["loss"], base["accuracy"])
        counted = slots.stage == Stage.FOSSILIZED if only_fossils else slots.occupied
        return HostMeasurements(
            **base,
            score=score,
            parameters=torch.tensor([float(costs.parameters) for costs in self._costs])
            + (self.seed_parameters(slots) * counted).sum(1),
            flops=self.total_flops,
            contribution=slot["contribution"],
            loss_contribution=self._loss_contribution,
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
