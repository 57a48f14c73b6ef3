"""Plateau rules: germinate when the score stops improving, fossilise seeds that contribute, prune the others."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from esper.controllers.controller import is_legal, make_action, wait_action
from esper.lifecycle import ActionSpace, Blend, Op, Stage
from esper.observation import Observation


@dataclass(frozen=True)
class HeuristicState:
    """The memory of the rules for one environment."""

    plateau: int = 0  # consecutive steps with little gain
    calm: int = 0  # consecutive steps with a steady loss
    is_stable: bool = False  # whether the loss was steady for long enough once
    steps_since_prune: int = 1_000  # at the start: longer than any cooldown
    next_blueprint: int = 0  # index
    penalties: dict[str, float] = field(default_factory=dict)  # of blueprints that were pruned


class HeuristicController:
    """One seed at a time, in the first free slot.

    Arguments:
        space: the action space
        blueprints: tried in this order, again and again; blueprints that the action space does not have are skipped
        plateau_gain: points; a step with a smaller gain of the score is on a plateau
        plateau_steps: consecutive plateau steps before a seed germinates
        earliest, latest: shares of the episode before and after which no seed germinates; a seed that cannot be
            fossilised in time is lost, although the host has adapted to it
        cooldown: share of the episode after a prune in which no seed germinates
        steady_range: lowest and highest relative decrease of the loss of a calm step
        calm_steps: consecutive calm steps after which the host is stable; no seed germinates before that
        max_drop: points; a seed in TRAINING or BLENDING is pruned if the score has fallen by more since it germinated
        patience: share of the episode that a seed spends in its stage before `max_drop` applies
        min_contribution: points; a seed in HOLDING is fossilised above this, else pruned
        prune_penalty: added to a blueprint's penalty when a seed of it is pruned
        penalty_decay: factor of all penalties in each step
        max_penalty: a blueprint with this penalty or more is skipped
    """

    flops = 0

    def __init__(
        self,
        space: ActionSpace,
        *,
        blueprints: Sequence[str],
        plateau_gain: float,
        plateau_steps: int,
        earliest: float,
        latest: float,
        cooldown: float,
        steady_range: Sequence[float],
        calm_steps: int,
        max_drop: float,
        patience: float,
        min_contribution: float,
        prune_penalty: float,
        penalty_decay: float,
        max_penalty: float,
    ) -> None:
        self._space = space
        self._blueprints = [name for name in blueprints if name in space.blueprints] or list(space.blueprints)
        self._plateau_gain, self._plateau_steps = plateau_gain, plateau_steps
        self._earliest, self._latest, self._cooldown, self._patience = earliest, latest, cooldown, patience
        self._steady_range, self._calm_steps = tuple(steady_range), calm_steps
        self._max_drop, self._min_contribution = max_drop, min_contribution
        self._prune_penalty, self._penalty_decay, self._max_penalty = prune_penalty, penalty_decay, max_penalty

    def begin(self, episode_seeds: Sequence[int]) -> list[HeuristicState]:
        return [HeuristicState() for _ in episode_seeds]

    def act(self, observation: Observation, memory: list[HeuristicState]) -> tuple[Tensor, list[HeuristicState]]:
        pairs = [self._act_in(observation, env, self._update(observation, env, old)) for env, old in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [state for _, state in pairs]

    def _update(self, observation: Observation, env: int, old: HeuristicState) -> HeuristicState:
        """The state after the last step."""
        view, decay = observation.view, self._penalty_decay
        penalties = {name: penalty * decay for name, penalty in old.penalties.items() if penalty * decay > 0.1}
        state = replace(old, penalties=penalties, steps_since_prune=old.steps_since_prune + 1)
        if view.step == 0:
            return state
        gain = (view.scores[env, -1] - view.scores[env, -2]).item()
        decrease = ((view.losses[env, -2] - view.losses[env, -1]) / view.losses[env, -2].abs().clamp(min=1e-8)).item()
        calm = old.calm + 1 if self._steady_range[0] < decrease < self._steady_range[1] else 0
        plateau = old.plateau + 1 if gain < self._plateau_gain else 0
        return replace(state, plateau=plateau, calm=calm, is_stable=old.is_stable or calm >= self._calm_steps)

    def _act_in(self, observation: Observation, env: int, state: HeuristicState) -> tuple[Tensor, HeuristicState]:
        view, space = observation.view, self._space
        live = view.slots.live[env].tolist()
        is_busy = False
        for column, slot in enumerate(space.slots):
            if live[column]:
                op = self._choose_op(observation, env, column)
                is_busy |= op is not Op.FOSSILIZE or op in space.ops  # without that op, such a seed is kept as it is
                if op is not Op.WAIT and is_legal(space, observation.masks, env, op, slot):
                    if op is Op.PRUNE:
                        state = self._penalise(state, space.blueprints[int(view.slots.blueprint[env, column])])
                    return make_action(space, op, slot=slot), state
        is_ready = state.is_stable and state.plateau >= self._plateau_steps and not is_busy
        is_ready &= self._earliest <= view.step / view.steps <= self._latest
        is_ready &= state.steps_since_prune >= self._cooldown * view.steps
        free = [slot for slot in space.slots if is_legal(space, observation.masks, env, Op.GERMINATE, slot)]
        if not is_ready or not free:
            return wait_action(space), state
        order = self._blueprints[state.next_blueprint :] + self._blueprints[: state.next_blueprint]
        blueprint = next((name for name in order if state.penalties.get(name, 0) < self._max_penalty), None)
        if blueprint is None:
            return wait_action(space), state
        next_blueprint = (self._blueprints.index(blueprint) + 1) % len(self._blueprints)
        action = make_action(space, Op.GERMINATE, slot=free[0], blueprint=blueprint, blend=Blend.ADD.name)
        return action, replace(state, next_blueprint=next_blueprint, plateau=0)

    def _choose_op(self, observation: Observation, env: int, column: int) -> Op:
        """The op for a live seed."""
        view = observation.view
        slots = view.slots
        stage = Stage(int(slots.stage[env, column]))
        contribution, progress = slots.contribution[env, column].item(), view.now.progress[env, column].item()
        if stage is Stage.HOLDING:
            if contribution != contribution:  # not measured yet
                return Op.WAIT
            if contribution > self._min_contribution and progress >= 0:
                return Op.FOSSILIZE
            return Op.PRUNE
        is_due = slots.steps_in_stage[env, column].item() >= self._patience * view.steps
        if stage in (Stage.TRAINING, Stage.BLENDING) and is_due and progress < -self._max_drop:
            return Op.PRUNE
        return Op.ADVANCE

    def _penalise(self, state: HeuristicState, blueprint: str) -> HeuristicState:
        penalty = state.penalties.get(blueprint, 0) + self._prune_penalty
        return replace(state, steps_since_prune=0, penalties={**state.penalties, blueprint: penalty})
