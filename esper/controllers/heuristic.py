"""Plateau rules: grow when the host stands still, keep what helps, prune what does not."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from esper.controllers.controller import is_legal, make_action, wait_action
from esper.lifecycle import ActionSpace, Blend, Op, Stage
from esper.observation import Observation


@dataclass(frozen=True)
class HeuristicState:
    """What the rules remember of one environment."""

    plateau: int = 0  # steps in a row with little gain
    calm: int = 0  # steps in a row with a steady loss
    stable: bool = False  # the loss has been steady once
    since_prune: int = 1_000
    turn: int = 0  # which blueprint comes next
    penalties: dict[str, float] = field(default_factory=dict)  # of blueprints that were pruned


class HeuristicController:
    """One seed at a time, in the first free slot.

    Arguments:
        space: the action space
        blueprints: tried in turn; those that the host cannot have are left out
        plateau_gain: points; a smaller gain of the score is a step of plateau
        plateau_steps: so many of them call for a seed
        earliest, latest: shares of the episode before and after which nothing germinates; a seed that cannot be
            fossilised in time is lost, and the host has come to lean on it
        rest: share of the episode after a prune in which nothing germinates
        steady: relative fall of the loss between which a step counts as calm
        calm_steps: so many calm steps in a row make the host stable
        hopeless: points; a seed that trains or blends since which the score has fallen by more is pruned
        patience: share of the episode that a seed is given before it is called hopeless
        keep: points of contribution with which a held seed is fossilised
        prune_penalty, forget, tolerance: a pruned blueprint is charged the first, which shrinks by the factor of the
            second each step, and is skipped while it owes the third or more
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
        self._earliest, self._latest, self._rest, self._patience = earliest, latest, cooldown, patience
        self._steady, self._calm_steps = tuple(steady_range), calm_steps
        self._hopeless, self._keep = max_drop, min_contribution
        self._prune_penalty, self._forget, self._tolerance = prune_penalty, penalty_decay, max_penalty

    def begin(self, episode_seeds: Sequence[int]) -> list[HeuristicState]:
        return [HeuristicState() for _ in episode_seeds]

    def act(self, observation: Observation, memory: list[HeuristicState]) -> tuple[Tensor, list[HeuristicState]]:
        pairs = [self._one(observation, env, self._watch(observation, env, old)) for env, old in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [tracked for _, tracked in pairs]

    def _watch(self, observation: Observation, env: int, old: HeuristicState) -> HeuristicState:
        """What the last step showed."""
        view = observation.view
        penalties = {name: owed * self._forget for name, owed in old.penalties.items() if owed * self._forget > 0.1}
        tracked = replace(old, penalties=penalties, since_prune=old.since_prune + 1)
        if view.step == 0:
            return tracked
        gain = (view.scores[env, -1] - view.scores[env, -2]).item()
        fall = ((view.losses[env, -2] - view.losses[env, -1]) / view.losses[env, -2].abs().clamp(min=1e-8)).item()
        calm = old.calm + 1 if self._steady[0] < fall < self._steady[1] else 0
        plateau = old.plateau + 1 if gain < self._plateau_gain else 0
        return replace(tracked, plateau=plateau, calm=calm, stable=old.stable or calm >= self._calm_steps)

    def _one(self, observation: Observation, env: int, tracked: HeuristicState) -> tuple[Tensor, HeuristicState]:
        view, space = observation.view, self._space
        live = view.slots.live[env].tolist()
        for column, slot in enumerate(space.slots):
            if live[column]:
                op = self._verdict(observation, env, column)
                if op is not Op.WAIT and is_legal(space, observation.masks, env, op, slot):
                    if op is Op.PRUNE:
                        tracked = self._charged(tracked, space.blueprints[int(view.slots.blueprint[env, column])])
                    return make_action(space, op, slot=slot), tracked
        ready = tracked.stable and tracked.plateau >= self._plateau_steps and not any(live)
        ready &= self._earliest <= view.step / view.steps <= self._latest
        ready &= tracked.since_prune >= self._rest * view.steps
        free = [slot for slot in space.slots if is_legal(space, observation.masks, env, Op.GERMINATE, slot)]
        if not ready or not free:
            return wait_action(space), tracked
        order = [self._blueprints[(tracked.turn + i) % len(self._blueprints)] for i in range(len(self._blueprints))]
        blueprint = next((name for name in order if tracked.penalties.get(name, 0) < self._tolerance), None)
        if blueprint is None:
            return wait_action(space), tracked
        turn = self._blueprints.index(blueprint) + 1
        action = make_action(space, Op.GERMINATE, slot=free[0], blueprint=blueprint, blend=Blend.ADD.name)
        return action, replace(tracked, turn=turn, plateau=0)

    def _verdict(self, observation: Observation, env: int, column: int) -> Op:
        """What should be done with a live seed."""
        view = observation.view
        slots = view.slots
        stage = Stage(int(slots.stage[env, column]))
        contribution, progress = slots.contribution[env, column].item(), view.now.progress[env, column].item()
        if stage is Stage.HOLDING:
            if contribution != contribution:  # not measured yet
                return Op.WAIT
            if contribution > self._keep and progress >= 0:
                return Op.FOSSILIZE
            return Op.PRUNE
        old = slots.steps_in_stage[env, column].item() >= self._patience * view.steps
        if stage in (Stage.TRAINING, Stage.BLENDING) and old and progress < -self._hopeless:
            return Op.PRUNE
        return Op.ADVANCE

    def _charged(self, tracked: HeuristicState, blueprint: str) -> HeuristicState:
        owed = tracked.penalties.get(blueprint, 0) + self._prune_penalty
        return replace(tracked, since_prune=0, penalties={**tracked.penalties, blueprint: owed})
