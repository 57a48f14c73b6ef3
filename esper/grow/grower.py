"""Grow a network in a training loop of one's own."""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.grow.controllers import choose_controller
from esper.grow.costs import NetworkCosts
from esper.grow.discovery import SlotTable, find_slots
from esper.grow.guard import GoodState
from esper.grow.history import GrowthHistory
from esper.grow.measuring import Measurer, StepResults
from esper.grow.network import base_digest, check_arguments, refuse_network, unwrap
from esper.grow.observe import StepMeasurements, missing_groups
from esper.grow.optimizers import SeedGroups
from esper.grow.plan import GrowthLimits, GrowthPlan
from esper.grow.spending import FlopsSpent
from esper.grow.structure import NetworkStructure, StructureChange, shared_blueprints
from esper.grow.tracing import Run

GROWER_VERSION = 1  # of the saved state


class Grower:
    """Grows a network while it trains: after each piece of training, `step` takes one decision.

    Arguments:
        model: any network; it does not change until a seed grows
        optimizer: the one that trains it, or several
        example: a batch, which is run once, or the table of `esper.slots`, which has run it already
        steps: calls of `step` in the whole training
        slots, exclude, blueprints, causal, run: see `esper.slots`
        controller: pretrained, gated, tuned_rule, fragrow, heuristic, schedule, none, the path of a checkpoint, a
            Controller, or a function that builds one for an ActionSpace
        settings: of a rule, that replace its defaults
        schedulers: those of the learning rates, or one
        seed_lr: learning rate of a seed, relative to that of the layers at its slot
        max_parameters: largest network, in multiples of the present one; None is no limit
        until: share of the training after which nothing new is planted
        budget_flops: FLOPs of the training; progress is then the share that is spent. None: the share of steps
        mode: whether a higher score is better, max, or a lower one, min
        score_scale: points of a score of 1, such as 100 for an accuracy from 0 to 1
        passes: the training in passes over the training set; None is `steps`
        chance_loss: validation loss at chance level; None is that of the number of outputs
        evaluate_samples: samples that `evaluate` runs through. With it, seeds are measured only as long as that costs
            at most `measure_share` of the training, and the cost is part of `flops`
        measure_share: see `evaluate_samples`
        guard: whether a non-finite loss removes the newest seed and restores the last good state
        rng_seed: of the weights of seeds and of the controller's random draws
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        example: Any,
        steps: int,
        slots: str | Sequence[str] = "auto",
        controller: object = "pretrained",
        settings: Mapping[str, Any] | None = None,
        blueprints: Sequence[str] | None = None,
        exclude: str | Sequence[str] = (),
        causal: bool = False,
        run: Run | None = None,
        schedulers: object = (),
        seed_lr: float = 1.0,
        max_parameters: float | None = None,
        until: float = 1.0,
        budget_flops: float | None = None,
        mode: Literal["max", "min"] = "max",
        score_scale: float = 100.0,
        passes: float | None = None,
        chance_loss: float | None = None,
        evaluate_samples: int | None = None,
        measure_share: float = 0.1,
        guard: bool = True,
        rng_seed: int = 0,
    ) -> None:
        check_arguments(
            steps, mode, max_parameters=max_parameters, until=until, budget_flops=budget_flops, seed_lr=seed_lr
        )
        refuse_network(model)
        self.model = unwrap(model)
        self.table = (
            example
            if isinstance(example, SlotTable)
            else find_slots(
                self.model, example, slots=slots, exclude=exclude, blueprints=blueprints, causal=causal, run=run
            )
        )
        self._digest, self._costs = base_digest(self.model), NetworkCosts(self.model, self.table)
        names, options = shared_blueprints(self.table), self.table.trace.options
        self._plan = GrowthPlan(
            choose_controller(
                controller,
                slots=self.table.names,
                blueprints=names,
                traits=self._costs.traits(names),
                steps=steps,
                settings=settings,
            ),
            self._costs,
            GrowthLimits(until, max_parameters),
            steps=steps,
            passes=float(steps) if passes is None else passes,
            chance_loss=math.log(options) if chance_loss is None and options is not None else chance_loss,
            rng_seed=rng_seed,
        )
        several = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._groups = SeedGroups(self.model, optimizers, several, lr_scale=seed_lr)
        self._spent = FlopsSpent(
            self._costs,
            self._plan,
            self._groups,
            batch=self.table.trace.batch,
            evaluate_samples=evaluate_samples,
            measure_share=measure_share,
        )
        self._structure = NetworkStructure(self.model, self.table, self._groups, rng_seed=rng_seed)
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what was compiled before would not notice the hooks
        self._measurer = Measurer(
            self.model,
            self._plan,
            self._structure,
            self._groups,
            self._spent,
            budget=budget_flops,
            factor=score_scale if mode == "max" else -score_scale,
        )
        self._guard = guard
        self._good: GoodState | None = None  # the last one, for the guard
        self._history = GrowthHistory(self._plan)

    def step(self, **known: Unpack[StepResults]) -> StructureChange:
        """Take one decision after a piece of training, and carry it out.

        Arguments:
            val_loss: validation loss
            train_loss: mean training loss since the last step; None is not known
            score: what the training is for, such as validation accuracy; None is the loss
            train_score: the same on training data; None is not known
            evaluate: measures the network again and returns the validation loss, or that and the score. It is called
                with all seeds, and with each live seed switched off
            progress: share of the training that is over; None is that of the budget, or of the steps
        """
        change, action = self.choose(self.measure(**known))
        return change if action is None else change + self.apply(action)

    def measure(self, **known: Unpack[StepResults]) -> StepMeasurements:
        """Collect what is known after a piece of training; arguments as in `step`.

        With several processes, send what one of them has collected to the others, so that all decide the same.
        """
        return self._measurer.collect(**known, good=self._good, guard=self._guard)

    def choose(self, measured: StepMeasurements) -> tuple[StructureChange, Tensor | None]:
        """Advance the lifecycle, which may remove seeds, and choose an action, int64 [1, heads]; None at the end.

        Every process must call this, with equal measurements.
        """
        plan, broken = self._plan, measured.rolled_back
        if not plan.has_started:
            plan.start(missing_groups(measured, self._costs))
        plan.measure(measured)
        change = self._structure.follow(plan)
        if broken is not None:
            warnings.warn(f"esper: the loss is non-finite; the seed in {broken} was removed.", stacklevel=2)
            if self._good is not None:
                self._good.restore(self.model, self._groups.optimizers)
        self._history.add(broken, self.flops)
        self._history.note_change(change)
        if plan.is_over:
            return change + self.finish(), None
        action = plan.choose()
        if self._guard and math.isfinite(measured.loss) and (plan.live or plan.is_germination(action)):
            self._good = GoodState.of(self.model, self._groups.optimizers, measured.loss, measured.score)
        return change, action

    def apply(self, action: Tensor) -> StructureChange:
        """Carry out an action. Every process must call this, with the same action."""
        self._plan.apply(action)
        change = self._structure.follow(self._plan)
        self._history.note_decision(self._plan.describe(action))
        self._history.note_change(change)
        return change

    def finish(self) -> StructureChange:
        """End the growth: keep the seeds that are blended in and healthy, and remove the others."""
        self._plan.finish()
        change = self._structure.follow(self._plan)
        self._history.note_change(change)
        return change

    def note_batch(self, samples: int) -> None:
        """Count training samples; without it, every optimizer step counts as one batch of the example."""
        self._spent.note_batch(samples)

    def note_evaluation(self, samples: int) -> None:
        """Set `evaluate_samples`, where it is known only during the training."""
        self._spent.evaluate_samples = samples

    @property
    def measured_slots(self) -> tuple[str, ...]:
        """Slots of the seeds that `evaluate` would measure now."""
        return self._measurer.measured_slots

    @property
    def can_measure(self) -> bool:
        """Whether the share of the training for measuring seeds is enough to measure one of them once."""
        return self._spent.can_measure

    @property
    def has_finished(self) -> bool:
        """Whether nothing is left to decide; a training that was resumed with more steps or FLOPs has not finished."""
        return self._plan.step >= self._plan.steps or (self._plan.is_over and self.spent_share >= 1)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A record for each step: results, the decision, and events in words."""
        return self._history.records

    @property
    def flops(self) -> float:
        """FLOPs that the training has spent."""
        return self._spent.total

    @property
    def spent_share(self) -> float:
        """The share of the budget that is spent, at most 1; without a budget, the share of steps."""
        return self._measurer.spent_share

    @property
    def is_over(self) -> bool:
        """Whether the budget or the steps have come to an end."""
        return self._plan.is_over or self.spent_share >= 1

    def explain(self) -> list[dict[str, Any]]:
        """For each decision, the probabilities of its options and the features that differ most from the training."""
        return [{"step": step, **asdict(explanation)} for step, explanation in self._plan.explanations]

    def summary(self) -> list[dict[str, Any]]:
        """A record for each seed of the network: slot, blueprint, when, stage, parameters and contribution."""
        return self._plan.summary()

    @property
    def schedulers(self) -> tuple[object, ...]:
        """The schedulers that it knows."""
        return self._groups.schedulers

    def add_scheduler(self, scheduler: object) -> None:
        """A scheduler that was built later; the groups of seeds that grow from now on are kept from it."""
        self._groups.add_scheduler(scheduler)

    def state_dict(self) -> dict[str, Any]:
        """Structure and course of the growth as plain data; weights are in the states of model and optimizers."""
        return {
            "version": GROWER_VERSION,
            "base": self._digest,
            "slots": list(self.table.names),
            "plan": self._plan.state_dict(),
            "structure": self._structure.state_dict(),
            "lr": self._measurer.state_dict(),
            "spent": self._spent.state_dict(),
            "history": self._history.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Rebuild the structure of a saved Grower; this one must be new.

        Load the states of model, optimizers and schedulers after this.
        """
        if state.get("version") != GROWER_VERSION:
            raise ValueError(f"version={state.get('version')}: must be {GROWER_VERSION}, in the state of a Grower.")
        if state["base"] != self._digest:
            raise ValueError(
                "model: must be the network of the saved state; its parameters have other names or shapes."
            )
        if tuple(state["slots"]) != self.table.names:
            raise ValueError(f"slots={list(self.table.names)}: must be {state['slots']}, as in the saved state.")
        self._plan.load_state_dict(state["plan"])
        self._structure.rebuild(self._plan, state["structure"])
        self._measurer.load_state_dict(state["lr"])
        self._spent.load_state_dict(state["spent"])
        self._history.load_state_dict(state["history"])

    def close(self) -> None:
        """Leave the optimizers and schedulers to themselves; without seeds, the network is as it was before."""
        self._groups.close()
        self._structure.close()
