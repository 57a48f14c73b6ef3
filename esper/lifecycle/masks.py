"""Masks: legal options, causal masks (heads that an action used) and availability masks (heads that had a choice)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from esper.lifecycle.actions import ActionSpace, Decision, Op
from esper.lifecycle.rules import Rules, passes_gate
from esper.lifecycle.slots import Slots
from esper.lifecycle.stages import NEXT, Stage


class HeadUsage(Protocol):
    """The heads of an action space or of a layout, and the ops that use them."""

    @property
    def head_names(self) -> tuple[str, ...]: ...

    def uses(self, device: torch.device | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Masks:
    """Legal options, true where legal. Each legal op with each slot that is true in its row is a legal pair."""

    op: Tensor  # [envs, ops]
    slot: Tensor  # [envs, ops, slots, and one for all of them]; a row is false if its op is illegal or uses no slot
    others: dict[str, Tensor]  # [envs, options] for each head after slot

    def to(self, device: torch.device) -> "Masks":
        return self.each(lambda mask: mask.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Masks":
        """Apply a function to every mask."""
        others = {name: change(mask) for name, mask in self.others.items()}
        return Masks(change(self.op), change(self.slot), others)

    def under(self, head: str, op: Tensor) -> Tensor:
        """The legal options of one head for each chosen op: [envs, options]. `op` [envs] indexes the space's ops."""
        if head == "op":
            return self.op
        if head == "slot":
            return self.slot[torch.arange(len(op), device=op.device), op]
        return self.others[head]


def allowed_slots(slots: Slots, space: ActionSpace, rules: Rules) -> dict[Op, Tensor]:
    """Slots where each op that uses a slot is legal: bool [envs, slots] by op; never one that the host lacks."""
    below_limit = torch.ones_like(slots.live[:, :1])
    if rules.max_live is not None:
        below_limit = slots.live.sum(1, keepdim=True) < rules.max_live
    ready = passes_gate(slots, rules)
    at_rest = ~slots.moving
    by_op = {
        Op.GERMINATE: (slots.stage == Stage.DORMANT) & below_limit,
        Op.ADVANCE: slots.in_stage(NEXT) & ready,
        Op.SET_ALPHA: slots.in_stage((Stage.BLENDING, Stage.HOLDING)) & at_rest,
        Op.PRUNE: slots.live & at_rest & (slots.age >= rules.prune_age),
        Op.FOSSILIZE: (slots.stage == Stage.HOLDING) & ready,
    }
    return {op: where & slots.exists for op, where in by_op.items() if op in space.ops}


def _allowed_in_all(slots: Slots, where: Mapping[Op, Tensor], rules: Rules) -> dict[Op, Tensor]:
    """Whether each op is legal in all slots where it is legal, bool [envs, 1] by op.

    It needs at least two of them: with one, it would be the same action as the op in that slot.
    """
    counts = {op: allowed.sum(1, keepdim=True) for op, allowed in where.items()}
    allowed_in_all = {op: count >= 2 for op, count in counts.items()}
    if rules.max_live is not None and Op.GERMINATE in where:
        allowed_in_all[Op.GERMINATE] &= slots.live.sum(1, keepdim=True) + counts[Op.GERMINATE] <= rules.max_live
    return allowed_in_all


def legal(slots: Slots, space: ActionSpace, rules: Rules) -> Masks:
    """The legal options now."""
    where = allowed_slots(slots, space, rules)
    if space.all_slots:
        in_all = _allowed_in_all(slots, where, rules)
        where = {op: torch.cat([allowed, in_all[op]], 1) for op, allowed in where.items()}
    no_slots = slots.live.new_zeros(len(slots.live), len(space.slot_options))
    by_slot = torch.stack([where.get(op, no_slots) for op in space.ops], dim=1)
    is_wait = torch.tensor([op is Op.WAIT for op in space.ops], device=by_slot.device)
    envs = by_slot.shape[0]
    others = {
        head.name: torch.ones(envs, head.size, dtype=torch.bool, device=by_slot.device)
        for head in space.heads
        if head.name not in ("op", "slot")
    }
    return Masks(op=by_slot.any(-1) | is_wait, slot=by_slot, others=others)


def acted_slots(slots: Slots, decision: Decision, space: ActionSpace, rules: Rules) -> Tensor:
    """The slots that each decision acts in: bool [envs, slots]; none for WAIT."""
    columns = torch.arange(len(space.slots), device=decision.slot.device)
    acted = (columns == decision.slot.unsqueeze(1)) & (decision.op != Op.WAIT).unsqueeze(1)
    if space.all_slots:
        in_all = decision.slot == len(space.slots)
        for op, allowed in allowed_slots(slots, space, rules).items():
            acted = acted | (allowed & (in_all & (decision.op == op)).unsqueeze(1))
    return acted


def causal(op: Tensor, table: HeadUsage) -> Tensor:
    """Heads that the chosen ops [...] use: bool [..., heads], on the same device."""
    return table.uses(op.device)[op]


def active(masks: Masks, op: Tensor, table: HeadUsage, masked: bool = True) -> Tensor:
    """Heads that the op uses and that had at least two legal options: bool [envs, heads].

    If not `masked`, every op counts as using all heads.
    """
    has_choice = torch.stack([masks.under(head, op).sum(-1) >= 2 for head in table.head_names], dim=-1)
    return causal(op, table) & has_choice if masked else has_choice


def available(masks: Masks, table: HeadUsage) -> Tensor:
    """Heads that had a choice with some legal op, independent of the op that was chosen: bool [envs, heads]."""
    has_choice = torch.stack([_has_choice(masks, head) for head in table.head_names], dim=-1)  # [envs, ops, heads]
    return (masks.op.unsqueeze(-1) & table.uses(masks.op.device) & has_choice).any(1)


def _has_choice(masks: Masks, head: str) -> Tensor:
    """Whether a head has at least two legal options for each op: bool [envs, ops]."""
    if head == "slot":
        return masks.slot.sum(-1) >= 2
    options = masks.op if head == "op" else masks.others[head]
    return (options.sum(-1, keepdim=True) >= 2).expand_as(masks.op)
