"""What is decided about growth, without the network: the lifecycle, the observations and the controller.

Everything follows from the measurements of each step, so they are all that has to be saved: a plan that is restored
runs through them again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.controllers import CheckedController, make_action
from esper.grow.controllers import AnyController, DecisionMaker
from esper.grow.costs import NetworkCosts
from esper.grow.explain import Explanation, explain_decision
from esper.grow.observe import Observer, StepMeasurements
from esper.growth import SeedSettings, seed_settings
from esper.lifecycle import Blend, Masks, Op, Slots, Stage, acted_slots, apply, commit, evict, legal, tick
from esper.observation import Observation, observe
from esper.rng import derive_seed


@dataclass(frozen=True)
class PlannedSeed:
    """A seed that a slot has."""

    slot: str
    blueprint: str
    blend: Blend


@dataclass(frozen=True)
class GrowthLimits:
    """What no decision may exceed."""

    until: float = 1.0  # share of the training after which nothing is planted
    max_parameters: float | None = None  # of network and seeds, in multiples of the network's


class GrowthPlan:
    """The course of one training.

    Arguments:
        maker: what decides
        costs: of the network
        limits: of growth
        steps: number of decisions
        passes, chance_loss: see `Observer`
        rng_seed: of the controller's random draws
    """

    def __init__(
        self,
        maker: DecisionMaker,
        costs: NetworkCosts,
        limits: GrowthLimits,
        *,
        steps: int,
        passes: float,
        chance_loss: float | None,
        rng_seed: int,
    ) -> None:
        self.maker, self.space, self.rules = maker, maker.space, maker.rules
        self._costs, self._limits, self._rng_seed = costs, limits, rng_seed
        self.slots = Slots.empty(1, len(self.space.slots))
        self._observer = Observer(costs, self.space, self.slots, steps=steps, passes=passes, chance_loss=chance_loss)
        self._controller: AnyController | None = None
        self._memory: Any = None
        self._missing: tuple[str, ...] = ()
        self._op, self._acted = torch.tensor([-1]), torch.zeros_like(self.slots.live)
        self._germinated = torch.zeros_like(self.slots.live)
        self._log: list[dict[str, Any]] = []
        self.explanations: list[tuple[int, Explanation]] = []

    @property
    def step(self) -> int:
        """Number of measurements so far."""
        return self._observer.view.step

    @property
    def steps(self) -> int:
        return self._observer.view.steps

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to decide."""
        clock = self._observer.view.clock
        return self.step >= self.steps or (clock is not None and clock.spent.item() >= 1)

    def start(self, missing: tuple[str, ...]) -> None:
        """Build the controller; `missing` are the optional groups of features that this training does not provide."""
        self._missing = missing
        self._controller = CheckedController(self.maker.build(missing), self.space, name=self.maker.name)
        self._memory = self._controller.begin([derive_seed("grow", self._rng_seed)])

    @property
    def has_started(self) -> bool:
        return self._controller is not None

    def measure(self, measured: StepMeasurements) -> None:
        """Advance the lifecycle by a piece of training and its measurements."""
        self._log.append({"measured": measured.to_dict(), "action": None, "finished": False})
        if measured.rolled_back is not None:
            lost = torch.tensor([[slot == measured.rolled_back for slot in self.space.slots]])
            self.slots, _ = evict(self.slots, lost, self.rules)
        self.slots, _ = tick(self.slots, measured.seeds(self.space), self.space, self.rules)
        self._observer.advance(measured, self.slots, self._germinated, self._op, self._acted)
        self._op, self._acted = torch.tensor([int(Op.WAIT)]), torch.zeros_like(self.slots.live)
        self._germinated = torch.zeros_like(self.slots.live)

    def choose(self) -> Tensor:
        """The controller's next action, int64 [1, heads]."""
        assert self._controller is not None
        observation = self._observe()
        before = self._memory
        action, self._memory = self._controller.act(observation, before)
        why = explain_decision(self._controller, observation, before, action, self.space)
        self.explanations.append((self.step, why))
        return make_action(self.space, Op.WAIT).unsqueeze(0) if self._exceeds(action) else action

    def apply(self, action: Tensor) -> None:
        """Carry out an action in the lifecycle."""
        self._log[-1]["action"] = action[0].tolist()
        decision = self.space.decode(action)
        self._acted = acted_slots(self.slots, decision, self.space, self.rules)
        self._op = decision.op
        self.slots, events = apply(self.slots, action, self.space, self.rules)
        self._germinated = events.into(Stage.GERMINATED)
        self._observer.note_germination(self._germinated)

    def finish(self) -> None:
        """Commit the seeds that are fully blended in and healthy, and remove the others."""
        if self._log:
            self._log[-1]["finished"] = True
        self.slots, _ = commit(self.slots, self.rules)
        self.slots, _ = evict(self.slots, torch.tensor([True]), self.rules)

    @property
    def seeds(self) -> dict[str, PlannedSeed]:
        """The seeds that the slots have."""
        return {seed[0]: PlannedSeed(*seed) for seed in self._costs.seeds(self.slots, self.space).values()}

    @property
    def settings(self) -> SeedSettings:
        """How each seed takes part in forward passes; one without a setting is switched off."""
        return seed_settings(self.slots, 0, self.space.slots)

    def stage(self, slot: str) -> Stage:
        return Stage(int(self.slots.stage[0, self.space.slots.index(slot)]))

    def age(self, slot: str) -> int:
        """Pieces of training since the seed in a slot was planted."""
        return int(self.slots.age[0, self.space.slots.index(slot)])

    @property
    def live(self) -> tuple[str, ...]:
        """Slots of seeds that may still be removed."""
        return tuple(slot for slot, alive in zip(self.space.slots, self.slots.live[0].tolist(), strict=True) if alive)

    def record(self) -> dict[str, Any]:
        """What is known after the last step."""
        view = self._observer.view
        now, clock = view.now, view.clock
        assert clock is not None
        contributions = zip(self.space.slots, now.contribution[0].tolist(), strict=True)
        return {
            "step": self.step,
            "progress": clock.spent.item(),
            "score": now.score.item(),
            "val_loss": now.loss.item(),
            "train_loss": now.train_loss.item(),
            "parameters": int(now.parameters.item()),
            "contribution": {slot: value for slot, value in contributions if value == value},
            "seeds": {seed.pop("slot"): seed for seed in self.summary()},
        }

    def summary(self) -> list[dict[str, Any]]:
        """A record for each seed."""
        sizes = self._costs.parameters_by_slot(self.slots, self.space)[0].tolist()
        records = []
        for column, (slot, name, blend) in self._costs.seeds(self.slots, self.space).items():
            contribution = self.slots.contribution[0, column].item()
            seed = {
                "blueprint": name,
                "blend": blend.name,
                "planted": self.step - int(self.slots.age[0, column]),
                "stage": Stage(int(self.slots.stage[0, column])).name,
                "alpha": self.slots.alpha[0, column].item(),
                "parameters": int(sizes[column]),
                "contribution": None if contribution != contribution else contribution,
            }
            records.append({"slot": slot, **seed})
        return records

    def is_germination(self, action: Tensor) -> bool:
        """Whether an action plants seeds."""
        return self.space.ops[int(action[0, 0])] is Op.GERMINATE

    def describe(self, action: Tensor) -> dict[str, str]:
        """An action by the names of its heads, of those that its op uses."""
        op = self.space.ops[int(action[0, 0])]
        heads = zip(self.space.heads, action[0].tolist(), strict=True)
        return {head.name: head.options[option] for head, option in heads if head.name == "op" or op in head.ops}

    def state_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "missing": list(self._missing),
            "started": self.has_started,
            "log": [dict(entry) for entry in self._log],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Run through a saved course; this plan must be new."""
        if self._log:
            raise ValueError("load_state_dict: must come before the first step.")
        if state["started"]:
            self.start(tuple(state["missing"]))
        for entry in state["log"]:
            self.measure(StepMeasurements.from_dict(entry["measured"]))
            if entry["action"] is not None:
                self.choose()  # for the controller's memory
                self.apply(torch.tensor([entry["action"]]))
            if entry["finished"]:
                self.finish()

    def _observe(self) -> Observation:
        masks = self._within_limits(legal(self.slots, self.space, self.rules))
        return observe(self._observer.view, masks, self.maker.features)

    def _within_limits(self, masks: Masks) -> Masks:
        """The masks without germinations that the limits forbid."""
        if Op.GERMINATE not in self.space.ops:
            return masks
        row = self.space.ops.index(Op.GERMINATE)
        allowed = self._slots_within_limits()
        op, slot = masks.op.clone(), masks.slot.clone()
        slot[0, row] &= allowed
        op[0, row] &= slot[0, row].any()
        return Masks(op, slot, masks.others)

    def _slots_within_limits(self) -> Tensor:
        """Slots, and all of them, where the smallest seed may be planted: bool [slot options]."""
        clock = self._observer.view.clock
        assert clock is not None
        if clock.spent.item() > self._limits.until:
            return torch.zeros(len(self.space.slot_options), dtype=torch.bool)
        left = self._parameters_left()
        smallest = [
            min(self._costs.seed_parameters(slot, name, Blend.ADD) for name in self.space.blueprints)
            for slot in self.space.slots
        ]
        free = [self.stage(slot) is Stage.DORMANT for slot in self.space.slots]
        fits = [size <= left for size in smallest]
        if self.space.all_slots:
            fits.append(sum(size for size, is_free in zip(smallest, free, strict=True) if is_free) <= left)
        return torch.tensor(fits)

    def _parameters_left(self) -> float:
        """Parameters that may still be added."""
        if self._limits.max_parameters is None:
            return float("inf")
        seeds = float(self._costs.parameters_by_slot(self.slots, self.space).sum())
        return (self._limits.max_parameters - 1) * self._costs.parameters - seeds

    def _exceeds(self, action: Tensor) -> bool:
        """Whether the seeds that an action plants are too large together."""
        decision = self.space.decode(action)
        if int(decision.op) != Op.GERMINATE or self._limits.max_parameters is None:
            return False
        columns = acted_slots(self.slots, decision, self.space, self.rules)[0].nonzero().flatten().tolist()
        name, blend = self.space.blueprints[int(decision.blueprint)], Blend(int(decision.blend))
        sizes = [self._costs.seed_parameters(self.space.slots[column], name, blend) for column in columns]
        return sum(sizes) > self._parameters_left()
