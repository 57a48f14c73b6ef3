"""Plant the same blueprint everywhere, then keep what contributes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.controllers.controller import first_available, is_legal, make_action, wait_action
from esper.lifecycle import ActionSpace, Blend, Op, Stage
from esper.observation import Observation

SHARE_TOLERANCE = 1e-9  # a share such as 0.55 of 20 steps is step 11


@dataclass(frozen=True)
class GatedState:
    """The memory of the rule for one environment; lists have an entry for each slot."""

    is_used: tuple[bool, ...]  # whether a seed has germinated in the slot
    totals: tuple[float, ...]  # sum of the contributions that were measured since the seed was fully blended
    counts: tuple[int, ...]  # number of these measurements


class GatedController:
    """Germinates one blueprint in every slot, one seed per decision; later it prunes each seed that does not help.

    A seed is judged once it has been fully blended for a while, by the mean of the contributions that were measured in
    that time. One that was never measured is kept. The slot of a pruned seed stays empty.

    Arguments:
        space: the action space
        blueprint: blueprints in order of preference; the first that the action space has is used
        earliest: share of the episode before which no seed germinates
        wait: share of the episode for which a seed is fully blended before it is judged
        min_contribution: decrease of the validation loss; a seed with less is pruned
    """

    flops = 0

    def __init__(
        self, space: ActionSpace, *, blueprint: Sequence[str], earliest: float, wait: float, min_contribution: float
    ) -> None:
        for key, share in (("earliest", earliest), ("wait", wait)):
            if not 0 <= share <= 1:
                raise ValueError(f"controller.gated.{key}={share}: must be between 0 and 1, a share of the episode.")
        self._space, self._blueprint = space, first_available(space, blueprint)
        self._earliest, self._wait, self._min_contribution = earliest, wait, min_contribution

    def begin(self, episode_seeds: Sequence[int]) -> list[GatedState]:
        count = len(self._space.slots)
        return [GatedState((False,) * count, (0.0,) * count, (0,) * count) for _ in episode_seeds]

    def act(self, observation: Observation, memory: list[GatedState]) -> tuple[Tensor, list[GatedState]]:
        pairs = [self._act_in(observation, env, self._update(observation, env, old)) for env, old in enumerate(memory)]
        return torch.stack([action for action, _ in pairs]), [state for _, state in pairs]

    def _update(self, observation: Observation, env: int, old: GatedState) -> GatedState:
        """The state with the contributions of the last step."""
        slots, contributions = observation.view.slots, measured_contributions(observation)[env].tolist()
        is_blended = (slots.stage[env] == Stage.HOLDING).tolist()
        is_new = [kept and value == value for kept, value in zip(is_blended, contributions, strict=True)]
        totals = [total + (value if new else 0.0)
                  for total, value, new in zip(old.totals, contributions, is_new, strict=True)]  # fmt: skip
        counts = tuple(count + new for count, new in zip(old.counts, is_new, strict=True))
        return replace(old, totals=tuple(totals), counts=counts)

    def _act_in(self, observation: Observation, env: int, state: GatedState) -> tuple[Tensor, GatedState]:
        space, view, masks = self._space, observation.view, observation.masks
        for slot in space.slots:
            if is_legal(space, masks, env, Op.ADVANCE, slot):
                return make_action(space, Op.ADVANCE, slot=slot), state
        free = [slot for slot, is_used in zip(space.slots, state.is_used, strict=True) if not is_used]
        for slot in free if view.step >= self._earliest * view.steps - SHARE_TOLERANCE else ():
            if is_legal(space, masks, env, Op.GERMINATE, slot):
                used = tuple(slot == other or old for other, old in zip(space.slots, state.is_used, strict=True))
                action = make_action(space, Op.GERMINATE, slot=slot, blueprint=self._blueprint, blend=Blend.ADD.name)
                return action, replace(state, is_used=used)
        for column, slot in enumerate(space.slots):
            op = self._judge(observation, env, column, state)
            if is_legal(space, masks, env, op, slot):
                return make_action(space, op, slot=slot), state
        return wait_action(space), state

    def _judge(self, observation: Observation, env: int, column: int, state: GatedState) -> Op:
        """The op for the seed of a slot; WAIT if it is not due."""
        view = observation.view
        is_blended = view.slots.stage[env, column] == Stage.HOLDING
        is_due = (
            is_blended and view.slots.steps_in_stage[env, column].item() >= self._wait * view.steps - SHARE_TOLERANCE
        )
        if not is_due:
            return Op.WAIT
        count = state.counts[column]
        return Op.PRUNE if count and state.totals[column] / count < self._min_contribution else Op.FOSSILIZE


def measured_contributions(observation: Observation) -> Tensor:
    """The loss without each seed minus the loss with it, if the last step measured it, else NaN: [envs, slots].

    On few images a loss is less noisy than an accuracy.
    """
    now = observation.view.now
    return torch.where(now.contribution.isnan(), torch.nan, now.loss_contribution)
