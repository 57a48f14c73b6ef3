"""What may be done, what was done, and what could have been: legal, causal and availability masks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from esper.lifecycle.actions import ActionSpace, Op
from esper.lifecycle.rules import Rules, may_leave
from esper.lifecycle.slots import Slots
from esper.lifecycle.stages import NEXT, Stage


class HeadUsage(Protocol):
    """The heads of an action space or of a layout, and which op uses which."""

    @property
    def head_names(self) -> tuple[str, ...]: ...

    def uses(self, device: torch.device | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Masks:
    """Legal options, true where allowed. Any legal op with any slot that its row allows is a legal pair."""

    op: Tensor  # [envs, ops]
    slot: Tensor  # [envs, ops, slots]; a row is all false where its op is illegal or uses no slot
    others: dict[str, Tensor]  # [envs, options] for each head behind the slot

    def to(self, device: torch.device) -> "Masks":
        return self.each(lambda mask: mask.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Masks":
        """The same change made to every mask."""
        others = {name: change(mask) for name, mask in self.others.items()}
        return Masks(change(self.op), change(self.slot), others)

    def under(self, head: str, op: Tensor) -> Tensor:
        """The options of one head once the op is chosen: [envs, options]. `op` [envs] indexes the space's ops."""
        if head == "op":
            return self.op
        if head == "slot":
            return self.slot[torch.arange(len(op), device=op.device), op]
        return self.others[head]


def allowed_slots(slots: Slots, space: ActionSpace, rules: Rules) -> dict[Op, Tensor]:
    """Where each op that uses a slot may be applied: bool [envs, slots] by op."""
    room = torch.ones_like(slots.live[:, :1])
    if rules.max_live is not None:
        room = slots.live.sum(1, keepdim=True) < rules.max_live
    ready = may_leave(slots, rules)
    rest = ~slots.moving
    by_op = {
        Op.GERMINATE: (slots.stage == Stage.DORMANT) & room,
        Op.ADVANCE: slots.in_stage(NEXT) & ready,
        Op.SET_ALPHA: slots.in_stage((Stage.BLENDING, Stage.HOLDING)) & rest,
        Op.PRUNE: slots.live & rest & (slots.age >= rules.prune_age),
        Op.FOSSILIZE: (slots.stage == Stage.HOLDING) & ready,
    }
    return {op: where for op, where in by_op.items() if op in space.ops}


def legal(slots: Slots, space: ActionSpace, rules: Rules) -> Masks:
    """Everything that may be done now."""
    where = allowed_slots(slots, space, rules)
    nowhere = torch.zeros_like(slots.live)
    by_slot = torch.stack([where.get(op, nowhere) for op in space.ops], dim=1)
    waiting = torch.tensor([op is Op.WAIT for op in space.ops], device=by_slot.device)
    envs = by_slot.shape[0]
    others = {
        head.name: torch.ones(envs, head.size, dtype=torch.bool, device=by_slot.device)
        for head in space.heads
        if head.name not in ("op", "slot")
    }
    return Masks(op=by_slot.any(-1) | waiting, slot=by_slot, others=others)


def causal(op: Tensor, table: HeadUsage) -> Tensor:
    """Which heads took part in what was done: bool [..., heads] for chosen ops [...], on the same device."""
    return table.uses(op.device)[op]


def active(masks: Masks, op: Tensor, table: HeadUsage, masked: bool = True) -> Tensor:
    """Which heads took part and had a choice, at least two legal options: bool [envs, heads].

    Unless `masked`, all heads take part whatever the op.
    """
    choice = torch.stack([masks.under(head, op).sum(-1) >= 2 for head in table.head_names], dim=-1)
    return causal(op, table) & choice if masked else choice


def available(masks: Masks, table: HeadUsage) -> Tensor:
    """Which heads had a choice under some legal op, whatever was done: bool [envs, heads]."""
    choice = torch.stack([_choice_by_op(masks, head) for head in table.head_names], dim=-1)  # [envs, ops, heads]
    return (masks.op.unsqueeze(-1) & table.uses(masks.op.device) & choice).any(1)


def _choice_by_op(masks: Masks, head: str) -> Tensor:
    """Whether a head has at least two options under each op: bool [envs, ops]."""
    if head == "slot":
        return masks.slot.sum(-1) >= 2
    options = masks.op if head == "op" else masks.others[head]
    return (options.sum(-1, keepdim=True) >= 2).expand_as(masks.op)
