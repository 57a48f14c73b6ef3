"""The masked, factored distribution over actions: the op, then the slot given the op, then the other heads it uses.

Every sampled action is legal, and the probabilities of all legal actions sum to one. A head that the op does not use is
not part of the action: its log-probability is 0 and its option is 0, unless `masked` is off.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle import Layout, Masks

ILLEGAL = -1e9  # logit with probability exactly 0 in float32, without NaN where a whole row is illegal
FLOOR_SHARE = 0.99  # largest total probability that a floor may spread evenly


@dataclass(frozen=True)
class Logits:
    """The logits of every option, for B observations."""

    op: Tensor  # [B, ops]
    slot: Tensor  # [B, ops, slots]; if the slot may be all of them, that is one more, also in `others`
    others: dict[str, Tensor]  # by head, [B, ops that use the head, slots, options]


def noise_width(layout: Layout) -> int:
    """Number of random draws for one action."""
    return sum(len(options) for options in layout.options.values())


def masked_log_probs(logits: Tensor, mask: Tensor, floor: float = 0.0) -> Tensor:
    """Log-probabilities over the last dimension.

    Every legal option has at least probability `floor`, or FLOOR_SHARE / legal options if that is less.
    """
    logits = logits.float()  # low precision would make ratios of old and new probabilities noisy
    log_probs = torch.where(mask, logits, ILLEGAL).log_softmax(-1)
    if not floor:
        return log_probs
    legal = mask.sum(-1, keepdim=True).clamp(min=1)
    min_prob = torch.full_like(legal, floor, dtype=log_probs.dtype).minimum(FLOOR_SHARE / legal)
    mixed = ((1 - legal * min_prob) * log_probs.exp() + min_prob).log()
    return torch.where(mask & (legal > 1), mixed, log_probs)


def normalised_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Entropy over the legal options of the last dimension, divided by its maximum; 0 with fewer than two options."""
    legal = mask.sum(-1)
    entropy = -(log_probs.exp() * torch.where(mask, log_probs, 0.0)).sum(-1)
    return torch.where(legal >= 2, entropy / legal.clamp(min=2).log(), 0.0)


class FactoredDistribution:
    """A distribution over actions [B, heads].

    Arguments:
        logits, masks: of B observations
        layout: heads and their options
        floors: minimum probability of a legal option, by head
        validate: raise on masks without a legal option and on non-finite logits; reads values from the device
        masked: whether heads that an op does not use are left out of the action
    """

    def __init__(
        self,
        logits: Logits,
        masks: Masks,
        layout: Layout,
        floors: Mapping[str, float],
        validate: bool,
        masked: bool = True,
    ) -> None:
        self._masks, self._layout, self._masked = masks, layout, masked
        if validate:
            _check(logits, masks, layout)
        self._op = masked_log_probs(logits.op, masks.op, floors.get("op", 0.0))
        self._slot = masked_log_probs(logits.slot, masks.slot, floors.get("slot", 0.0))
        self._others = {
            head: masked_log_probs(table, masks.others[head][:, None, None], floors.get(head, 0.0))
            for head, table in logits.others.items()
        }

    def sample(self, noise: Tensor) -> Tensor:
        """One action per observation; `noise` [B, options of all heads] is drawn from Exponential(1).

        The option with the smallest noise / probability is a sample from the distribution, and always legal.
        """
        sizes = [len(options) for options in self._layout.options.values()]
        by_head = dict(zip(self._layout.head_names, torch.split(noise.clamp(min=1e-30).log(), sizes, -1), strict=True))
        return self._choose(by_head)

    def mode(self) -> Tensor:
        """The most likely option of each head, one head after the other."""
        return self._choose({})

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of each head's option: [B, heads]; the sum over heads is that of the action."""
        columns = []
        for index, head in enumerate(self._layout.head_names):
            row = self._row(head, action)
            columns.append(row.gather(-1, action[:, index : index + 1]).squeeze(-1))
        return torch.where(self._is_used(action[:, 0]), torch.stack(columns, -1), 0.0)

    def probabilities(self, head: str, action: Tensor) -> Tensor:
        """The probability of each option of a head, [B, options], given the heads before it in the actions."""
        return self._row(head, action).exp()

    def entropy(self) -> Tensor:
        """Normalised entropy of each head, [B, heads], conditional on the heads before it.

        It is the plain mean over all legal combinations of op and slot that use the head with at least two options, no
        matter how likely they are, so that rarely used heads get as much exploration as others.
        """
        masks, uses = self._masks, self._layout.uses(self._op.device)
        columns = [normalised_entropy(self._op, masks.op)]
        for index, head in enumerate(self._layout.head_names[1:], 1):
            if head == "slot":
                table, mask = self._slot, masks.slot
                is_used = masks.op & uses[:, index]  # [B, ops]
            else:
                table, mask = self._others[head], masks.others[head][:, None, None].expand_as(self._others[head])
                users = self._users(head)
                is_used = masks.op[:, users, None] & masks.slot[:, users]  # [B, users, slots]
            is_used = is_used & (mask.sum(-1) >= 2)
            total = (normalised_entropy(table, mask) * is_used).flatten(1).sum(-1)
            columns.append(total / is_used.flatten(1).sum(-1).clamp(min=1))
        return torch.stack(columns, -1)

    def _choose(self, noise: Mapping[str, Tensor]) -> Tensor:
        columns: list[Tensor] = []
        for head in self._layout.head_names:
            row = self._row(head, torch.stack(columns, -1) if columns else None)
            columns.append((row - noise[head] if noise else row).argmax(-1))
        action = torch.stack(columns, -1)
        return torch.where(self._is_used(action[:, 0]), action, 0)

    def _row(self, head: str, action: Tensor | None) -> Tensor:
        """Log-probabilities of one head's options [B, options], given the heads before it."""
        if head == "op" or action is None:
            return self._op
        rows = torch.arange(len(action), device=action.device)
        if head == "slot":
            return self._slot[rows, action[:, 0]]
        position = torch.zeros(len(self._layout.ops), dtype=torch.int64, device=action.device)  # op -> row of the table
        users = self._users(head)
        position[users] = torch.arange(len(users), device=action.device)
        slot = action[:, 1] if "slot" in self._layout.options else torch.zeros_like(action[:, 0])
        return self._others[head][rows, position[action[:, 0]], slot]

    def _users(self, head: str) -> list[int]:
        """Indices of the ops that use a head."""
        return [self._layout.ops.index(op) for op in self._layout.users[head]]

    def _is_used(self, op: Tensor) -> Tensor:
        """Which heads count in an action with this op: bool [B, heads]."""
        is_used = self._layout.uses(op.device)[op]
        return is_used if self._masked else torch.ones_like(is_used)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads values
def _check(logits: Logits, masks: Masks, layout: Layout) -> None:
    rows = [masks.op.any(-1).all()]
    if "slot" in layout.options:
        using = layout.uses(masks.op.device)[:, layout.head_names.index("slot")]
        rows.append((masks.slot.any(-1) | ~(masks.op & using)).all())
    rows += [mask.any(-1).all() for mask in masks.others.values()]
    finite = [table.isfinite().all() for table in (logits.op, logits.slot, *logits.others.values())]
    has_options, is_finite = torch.stack([torch.stack(rows).all(), torch.stack(finite).all()]).tolist()
    if not has_options:
        raise ValueError("masks: an observation has a head without a legal option; must have at least one.")
    if not is_finite:
        raise ValueError("policy: logits must be finite.")
