"""The functions that change slots: `apply` an action, `tick` after a step, `commit` or `evict` live seeds.

A ramp of n ticks sets alpha to curve(1/n) ... curve(n/n): the first value immediately, so that it affects the step
that follows, and each further value at a tick. A ramp of zero ticks sets alpha to its target immediately. A seed that
is blending out is removed as soon as its alpha is 0.
"""

import torch
from torch import Tensor

from esper.lifecycle.actions import ActionSpace, Decision, Op
from esper.lifecycle.alpha import ramp
from esper.lifecycle.masks import acted_slots, legal
from esper.lifecycle.rules import Rules, passes_gate
from esper.lifecycle.slots import Events, SeedMeasurements, Slots
from esper.lifecycle.stages import NEXT, Stage


def apply(slots: Slots, action: Tensor, space: ActionSpace, rules: Rules) -> tuple[Slots, Events]:
    """Apply one action in each environment; `action` is int64 [envs, heads]. An illegal action raises ValueError."""
    decision = space.decode(action)
    _refuse_illegal(slots, decision, space, rules)
    acted = acted_slots(slots, decision, space, rules)
    at: dict[Op, Tensor] = {op: acted & (decision.op == op).unsqueeze(1) for op in space.ops if op is not Op.WAIT}

    def each_slot(value: Tensor) -> Tensor:
        return value.unsqueeze(1).expand_as(slots.stage)

    update = _SlotUpdate(slots)
    if Op.GERMINATE in at:
        update.enter(
            at[Op.GERMINATE],
            Stage.GERMINATED,
            blueprint=each_slot(decision.blueprint),
            blend=each_slot(decision.blend),
            alpha_target=each_slot(decision.alpha_target),
            ramp_ticks=each_slot(decision.tempo) if rules.ramp is None else rules.ramp,
            curve=each_slot(decision.alpha_curve),
        )
    if Op.ADVANCE in at:
        update.advance(at[Op.ADVANCE])
    if Op.SET_ALPHA in at:
        target = each_slot(decision.alpha_target)
        change = at[Op.SET_ALPHA] & (target != slots.alpha)
        update.enter(change & (slots.stage == Stage.HOLDING), Stage.BLENDING)
        update.start_ramp(change, target, each_slot(decision.alpha_speed), each_slot(decision.alpha_curve))
    if Op.PRUNE in at:
        fading = at[Op.PRUNE] & (slots.alpha > 0)
        zero = torch.zeros_like(slots.alpha)
        update.start_ramp(fading, zero, each_slot(decision.alpha_speed), each_slot(decision.alpha_curve))
        update.enter(fading & (slots.stage == Stage.HOLDING) & (update.slots.alpha > 0), Stage.BLENDING)
        update.remove(at[Op.PRUNE] & (update.slots.alpha == 0), rules)
    if Op.FOSSILIZE in at:
        update.enter(at[Op.FOSSILIZE], Stage.FOSSILIZED)
    if space.auto_advance:  # without dwell times, a new seed is as far as its gates allow in the step that follows
        new = update.slots.stage == Stage.GERMINATED
        for stage in NEXT:
            update.advance(new & (update.slots.stage == stage) & passes_gate(update.slots, rules))
    return update.slots, update.events


def tick(slots: Slots, measured: SeedMeasurements, space: ActionSpace, rules: Rules) -> tuple[Slots, Events]:
    """Advance the clock by one step, with the measurements of that step."""
    update = _SlotUpdate(_age_slots(slots, measured))
    due = update.slots.in_stage(NEXT) & passes_gate(update.slots, rules)  # gates apply to the state during the step
    update.step_ramps(update.slots.moving)
    if space.auto_advance:
        update.advance(due)
    update.remove(update.slots.blending_out & (update.slots.alpha == 0), rules)
    update.free((update.slots.stage == Stage.PRUNED) & (update.slots.steps_in_stage >= rules.cooldown))
    return update.slots, update.events


def commit(slots: Slots, rules: Rules) -> tuple[Slots, Events]:
    """Fossilise every live seed that is fully blended in and healthy; nothing unless `rules.commit` is auto.

    Call it at the start of the last step, after `apply`. Fully blended in is alpha 1 at the end of its ramp; healthy is
    the health that the gate of HOLDING requires. Dwell times and contributions do not matter.
    """
    update = _SlotUpdate(slots)
    if rules.commit == "auto":
        is_blended = slots.in_stage((Stage.BLENDING, Stage.HOLDING)) & (slots.alpha == 1)
        kept = is_blended & ~slots.moving & ~slots.blending_out
        required = rules.gates[Stage.HOLDING].health
        if required is not None:
            kept = kept & (slots.health >= required)
        update.enter(kept & (slots.stage == Stage.BLENDING), Stage.HOLDING)
        update.enter(kept, Stage.FOSSILIZED)
    return update.slots, update.events


def evict(slots: Slots, envs: Tensor, rules: Rules) -> tuple[Slots, Events]:
    """Remove live seeds, independent of age and alpha: all of some environments, bool [envs], or bool [envs, slots]."""
    update = _SlotUpdate(slots)
    update.remove(slots.live & (envs if envs.ndim == 2 else envs.unsqueeze(1)), rules)
    return update.slots, update.events


def _age_slots(slots: Slots, measured: SeedMeasurements) -> Slots:
    """A copy that is one step older, with the latest measurements."""
    slots = slots.where(slots.stage != Stage.DORMANT, steps_in_stage=slots.steps_in_stage + 1)
    slots = slots.where(slots.occupied, age=slots.age + 1)
    slots = slots.where(slots.contribution_age >= 0, contribution_age=slots.contribution_age + 1)
    new = slots.occupied & ~measured.contribution.isnan()
    slots = slots.where(new, contribution=measured.contribution, contribution_age=0)
    return slots.where(slots.occupied & ~measured.health.isnan(), health=measured.health)


def _refuse_illegal(slots: Slots, decision: Decision, space: ActionSpace, rules: Rules) -> None:
    allowed = legal(slots, space, rules).slot
    for index, op in enumerate(space.ops):
        is_allowed = allowed[:, index].gather(1, decision.slot.unsqueeze(1)).squeeze(1)
        is_illegal = (decision.op == op) & ~is_allowed
        if op is Op.WAIT or not is_illegal.any():
            continue
        env = int(is_illegal.nonzero()[0])
        slot = int(decision.slot[env])
        if slot == len(space.slots):
            raise ValueError(
                f"{op.name} in all slots of environment {env} is illegal now; it must be legal in at least two, and "
                "lifecycle.max_live must allow all of them."
            )
        reason = Stage(int(slots.stage[env, slot])).name if slots.exists[env, slot] else "its host has no such slot"
        raise ValueError(f"{op.name} in slot {space.slots[slot]} of environment {env} is illegal now ({reason}).")


class _SlotUpdate:
    """Collects the changes of one call: the slots so far and the stages they entered."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._entered = torch.zeros(*slots.stage.shape, len(Stage), dtype=torch.bool, device=slots.stage.device)

    @property
    def events(self) -> Events:
        return Events(entered=self._entered)

    def enter(self, mask: Tensor, stage: Stage, **values: Tensor | float) -> None:
        self.slots = self.slots.where(mask, stage=stage, steps_in_stage=0, **values)
        self._entered[..., stage] |= mask

    def advance(self, mask: Tensor) -> None:
        """Move each slot in `mask` to its next stage."""
        before = self.slots.stage
        for stage, following in NEXT.items():
            self.enter(mask & (before == stage), following)
        self.step_ramps(mask & (before == Stage.TRAINING))

    def start_ramp(self, mask: Tensor, target: Tensor, ticks: Tensor, curve: Tensor) -> None:
        now = self.slots.alpha
        self.slots = self.slots.where(
            mask, alpha_start=now, alpha_target=target, ramp_done=0, ramp_ticks=ticks, curve=curve
        )
        self.step_ramps(mask)

    def step_ramps(self, mask: Tensor) -> None:
        slots = self.slots.where(mask, ramp_done=torch.minimum(self.slots.ramp_done + 1, self.slots.ramp_ticks))
        alpha = ramp(slots.alpha_start, slots.alpha_target, slots.ramp_done, slots.ramp_ticks, slots.curve)
        self.slots = slots.where(mask, alpha=alpha)

    def remove(self, mask: Tensor, rules: Rules) -> None:
        self.enter(mask, Stage.PRUNED)
        self.slots = self.slots.clear(mask)
        if rules.cooldown == 0:
            self.free(mask)

    def free(self, mask: Tensor) -> None:
        self.enter(mask, Stage.DORMANT)
