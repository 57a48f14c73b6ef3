"""The masked, factored distribution over actions: the op, then the slot under that op, then the heads that op uses.

Every action that is drawn is legal, and the probabilities of all legal actions sum to one. A head that the op does not
use is no part of the action: its log-probability is 0 and its option is written as 0, unless all heads are to count.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper.lifecycle import Layout, Masks

ILLEGAL = -1e9  # a logit that leaves exactly no probability in float32, and still no NaN where a whole row is illegal
FLOOR_SHARE = 0.99  # of all probability, at most, that a floor may give away evenly


@dataclass(frozen=True)
class Logits:
    """What a network says of each option; B is any number of observations."""

    op: Tensor  # [B, ops]
    slot: Tensor  # [B, ops, slots]
    others: dict[str, Tensor]  # [B, ops that use the head, slots, options] for each further head


def masked_log_probs(logits: Tensor, mask: Tensor, floor: float = 0.0) -> Tensor:
    """Log-probabilities over the last dimension; every legal option has at least `floor`, as far as that can be."""
    logits = logits.float()  # low precision would make ratios of old and new probabilities noisy
    log_probs = torch.where(mask, logits, ILLEGAL).log_softmax(-1)
    if not floor:
        return log_probs
    legal = mask.sum(-1, keepdim=True).clamp(min=1)
    least = torch.full_like(legal, floor, dtype=log_probs.dtype).minimum(FLOOR_SHARE / legal)
    lifted = ((1 - legal * least) * log_probs.exp() + least).log()
    return torch.where(mask & (legal > 1), lifted, log_probs)


def normalised_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Entropy over the legal options of the last dimension as a share of the most it could be; 0 without a choice."""
    legal = mask.sum(-1)
    entropy = -(log_probs.exp() * torch.where(mask, log_probs, 0.0)).sum(-1)
    return torch.where(legal >= 2, entropy / legal.clamp(min=2).log(), 0.0)


class FactoredDistribution:
    """A distribution over actions [B, heads].

    Arguments:
        logits, masks: of B observations
        layout: what the heads are
        floors: least probability of a legal option, by head
        validate: refuse masks without a legal option and logits that are not finite; costs a look at the device
        masked: whether heads that an op does not use stay out of the action
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
        """An action for each observation; `noise` [B, options of all heads] is drawn from Exponential(1).

        The option of the smallest noise / probability is a draw by the probabilities, and never an illegal one.
        """
        sizes = [len(options) for options in self._layout.options.values()]
        by_head = dict(zip(self._layout.head_names, torch.split(noise.clamp(min=1e-30).log(), sizes, -1), strict=True))
        return self._choose(by_head)

    def mode(self) -> Tensor:
        """The likeliest option of each head in turn."""
        return self._choose({})

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of each head's option: [B, heads]; their sum is the action's."""
        columns = []
        for index, head in enumerate(self._layout.head_names):
            row = self._row(head, action)
            columns.append(row.gather(-1, action[:, index : index + 1]).squeeze(-1))
        return torch.where(self._used(action[:, 0]), torch.stack(columns, -1), 0.0)

    def entropy(self) -> Tensor:
        """Normalised entropy of each head [B, heads]; of heads behind the op, given what was chosen before.

        It is the even mean over all legal ways in which the head could be asked with at least two options, however
        unlikely the policy makes them: what is rarely used is kept open as firmly as what is often used.
        """
        masks, uses = self._masks, self._layout.uses(self._op.device)
        columns = [normalised_entropy(self._op, masks.op)]
        for index, head in enumerate(self._layout.head_names[1:], 1):
            if head == "slot":
                table, mask = self._slot, masks.slot
                asked = masks.op & uses[:, index]  # [B, ops]
            else:
                table, mask = self._others[head], masks.others[head][:, None, None].expand_as(self._others[head])
                users = self._users(head)
                asked = masks.op[:, users, None] & masks.slot[:, users]  # [B, users, slots]
            asked = asked & (mask.sum(-1) >= 2)
            total = (normalised_entropy(table, mask) * asked).flatten(1).sum(-1)
            columns.append(total / asked.flatten(1).sum(-1).clamp(min=1))
        return torch.stack(columns, -1)

    def _choose(self, noise: Mapping[str, Tensor]) -> Tensor:
        columns: list[Tensor] = []
        for head in self._layout.head_names:
            row = self._row(head, torch.stack(columns, -1) if columns else None)
            columns.append((row - noise[head] if noise else row).argmax(-1))
        action = torch.stack(columns, -1)
        return torch.where(self._used(action[:, 0]), action, 0)

    def _row(self, head: str, action: Tensor | None) -> Tensor:
        """Log-probabilities of one head's options [B, options], given the heads before it."""
        if head == "op" or action is None:
            return self._op
        every = torch.arange(len(action), device=action.device)
        if head == "slot":
            return self._slot[every, action[:, 0]]
        place = torch.zeros(len(self._layout.ops), dtype=torch.int64, device=action.device)
        users = self._users(head)
        place[users] = torch.arange(len(users), device=action.device)
        slot = action[:, 1] if "slot" in self._layout.options else torch.zeros_like(action[:, 0])
        return self._others[head][every, place[action[:, 0]], slot]

    def _users(self, head: str) -> list[int]:
        return [self._layout.ops.index(op) for op in self._layout.users[head]]

    def _used(self, op: Tensor) -> Tensor:
        used = self._layout.uses(op.device)[op]
        return used if self._masked else torch.ones_like(used)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it looks at values
def _check(logits: Logits, masks: Masks, layout: Layout) -> None:
    rows = [masks.op.any(-1).all()]
    if "slot" in layout.options:
        using = layout.uses(masks.op.device)[:, layout.head_names.index("slot")]
        rows.append((masks.slot.any(-1) | ~(masks.op & using)).all())
    rows += [mask.any(-1).all() for mask in masks.others.values()]
    finite = [table.isfinite().all() for table in (logits.op, logits.slot, *logits.others.values())]
    some, sane = torch.stack([torch.stack(rows).all(), torch.stack(finite).all()]).tolist()
    if not some:
        raise ValueError("masks: an observation has a head without a legal option.")
    if not sane:
        raise ValueError("policy: its logits are not finite.")
