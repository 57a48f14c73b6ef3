"""Growth by trial: plans that run one after the other, of which the last one stays."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.controllers.controller import is_legal, make_action, wait_action
from esper.lifecycle import ALL_SLOTS, ActionSpace, Op, Rules
from esper.observation import Observation
from esper.tasks import FixedPlan


@dataclass(frozen=True)
class TrialMemory:
    """Progress of one episode."""

    number: int = 0  # of the current plan
    planted: int | None = None  # steps that were done when its last seed was planted


class TrialController:
    """Runs the plans of each episode in turn: all but the last are pruned after some steps.

    The first plan starts at its own moment, each later one as soon as the slots are free again. A single plan is a
    fixed schedule. A seed that may be fossilised and would be lost otherwise is fossilised if its plan is the last.

    Arguments:
        space, rules: the action space and the lifecycle rules
        plans: the plans of each episode, at least one; the empty plan waits
        patience: steps from the one in which its last seed was planted, after which a plan is pruned
    """

    flops = 0

    def __init__(
        self, space: ActionSpace, rules: Rules, plans: Sequence[Sequence[FixedPlan]], *, patience: int
    ) -> None:
        self._space, self._plans, self._patience = space, plans, patience
        kept = (Op.FOSSILIZE,) if rules.commit == "explicit" else ()
        self._routine = tuple(op for op in (*kept, Op.ADVANCE) if op in space.ops)

    def begin(self, episode_seeds: Sequence[int]) -> list[TrialMemory]:
        return [TrialMemory() for _ in episode_seeds]

    def act(self, observation: Observation, memory: list[TrialMemory]) -> tuple[Tensor, list[TrialMemory]]:
        pairs = [self._act_in(observation, env, known) for env, known in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [known for _, known in pairs]

    def _act_in(self, observation: Observation, env: int, known: TrialMemory) -> tuple[Tensor, TrialMemory]:
        view, plans = observation.view, self._plans[env]
        is_occupied = view.slots.occupied[env]
        if known.planted is not None and known.number + 1 < len(plans):
            if view.step < known.planted + self._patience:
                return wait_action(self._space), known
            if is_occupied.any():
                return self._act_on_seeds(observation, env, (Op.PRUNE,)), known
            known = TrialMemory(known.number + 1)
        is_last = known.number + 1 == len(plans)
        if known.planted is None and (known.number or view.step >= math.ceil(plans[0].at * view.steps)):
            wanted = plans[known.number].by_slot(self._space.present_slots(observation.exists[env]))
            missing = [slot for slot in wanted if not is_occupied[self._space.slots.index(slot)]]
            action, count = self._plant(observation, env, {slot: wanted[slot] for slot in missing})
            if count or not missing:
                done = count == len(missing)
                return action, replace(known, planted=view.step + 1 if done else None)
        return self._act_on_seeds(observation, env, self._routine if is_last else ()), known

    def _plant(self, observation: Observation, env: int, wanted: dict[str, str]) -> tuple[Tensor, int]:
        """Germinate all seeds at once if one action can, else the first that is legal; and how many these are."""
        space, masks = self._space, observation.masks
        legal = [slot for slot in wanted if is_legal(space, masks, env, Op.GERMINATE, slot)]
        is_whole = set(wanted) == set(space.present_slots(observation.exists[env])) and len(set(wanted.values())) == 1
        if space.all_slots and is_whole and len(wanted) > 1:
            if len(legal) < len(wanted):
                return wait_action(space), 0
            return make_action(space, Op.GERMINATE, slot=ALL_SLOTS, blueprint=wanted[legal[0]]), len(wanted)
        if not legal:
            return wait_action(space), 0
        return make_action(space, Op.GERMINATE, slot=legal[0], blueprint=wanted[legal[0]]), 1

    def _act_on_seeds(self, observation: Observation, env: int, ops: Sequence[Op]) -> Tensor:
        """The first legal op, in all slots if that may be chosen and several have it; else WAIT."""
        space, masks = self._space, observation.masks
        for op in ops:
            legal = [slot for slot in space.slots if is_legal(space, masks, env, op, slot)]
            if legal:
                is_whole = space.all_slots and len(legal) > 1
                return make_action(space, op, slot=ALL_SLOTS if is_whole else legal[0])
        return wait_action(space)
