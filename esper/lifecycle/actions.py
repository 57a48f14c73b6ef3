"""Ops, the head table, and action spaces.

One table lists every head: its options, their values, and the ops that use it. Network sizes, masks, storage,
losses and logging all loop over it. Which heads each op uses, besides the op itself:

| op        | heads                                        |
|-----------|----------------------------------------------|
| WAIT      | none                                         |
| GERMINATE | slot, blueprint, blend, tempo, alpha_target  |
| ADVANCE   | slot                                         |
| SET_ALPHA | slot, alpha_target, alpha_speed, alpha_curve |
| PRUNE     | slot, alpha_speed, alpha_curve               |
| FOSSILIZE | slot                                         |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from esper.lifecycle.alpha import Curve


class Op(IntEnum):
    """The kind of action."""

    WAIT = 0
    GERMINATE = 1
    ADVANCE = 2
    SET_ALPHA = 3
    PRUNE = 4
    FOSSILIZE = 5


class Blend(IntEnum):
    """How a seed's output is combined with the host's features."""

    ADD = 0  # cross-fade from the host's features to the seed's
    MULTIPLY = 1  # scale the host's features by 1 + alpha * tanh(change by the seed)
    GATED = 2  # cross-fade with a learned gate


@dataclass(frozen=True)
class Head:
    """One factor of an action."""

    name: str
    options: tuple[str, ...]  # empty for slot and blueprint, which depend on the run
    values: tuple[float, ...]  # the value of each option
    ops: frozenset[Op]  # the ops that use this head

    @property
    def size(self) -> int:
        return len(self.options)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the values: float32 if any is a float, else int64."""
        return torch.float32 if any(isinstance(value, float) for value in self.values) else torch.int64


def _head(name: str, options: Mapping[str, float], *ops: Op) -> Head:
    return Head(name, tuple(options), tuple(options.values()), frozenset(ops))


def _members(enum: type[IntEnum]) -> dict[str, float]:
    return {member.name: member.value for member in enum}


TEMPO = {"FAST": 3, "STANDARD": 5, "SLOW": 8}  # ticks of blending in
SPEED = {"INSTANT": 0, "FAST": 3, "MEDIUM": 5, "SLOW": 8}  # ticks of a later change of alpha
TARGET = {"HALF": 0.5, "MOST": 0.7, "FULL": 1.0}  # alpha
ALL_SLOTS = "all"  # option of the slot head: every slot where the op is legal

HEADS: tuple[Head, ...] = (
    _head("op", _members(Op), Op.WAIT, Op.GERMINATE, Op.ADVANCE, Op.SET_ALPHA, Op.PRUNE, Op.FOSSILIZE),
    _head("slot", {}, Op.GERMINATE, Op.ADVANCE, Op.SET_ALPHA, Op.PRUNE, Op.FOSSILIZE),
    _head("blueprint", {}, Op.GERMINATE),
    _head("blend", _members(Blend), Op.GERMINATE),
    _head("tempo", TEMPO, Op.GERMINATE),
    _head("alpha_target", TARGET, Op.GERMINATE, Op.SET_ALPHA),
    _head("alpha_speed", SPEED, Op.SET_ALPHA, Op.PRUNE),
    _head("alpha_curve", _members(Curve), Op.SET_ALPHA, Op.PRUNE),
)
HEAD_NAMES: tuple[str, ...] = tuple(head.name for head in HEADS)

FEW_HEADS = ("op", "slot", "blueprint")  # what is decided where few decisions matter
PLAIN_OPTIONS = {  # of the other heads, for library use without a configuration; a pruned seed is removed at once
    "blend": "ADD", "tempo": "FAST", "alpha_target": "FULL", "alpha_speed": "INSTANT", "alpha_curve": "LINEAR",
}  # fmt: skip


class ActionSpace:
    """The ops and heads that a controller chooses from.

    An action is an int64 tensor [envs, heads] of option indices, in the order of `self.heads`, the op first. A head
    that is not in `heads`, or that the chosen op does not use, takes its fixed option. If ADVANCE is not in `ops`,
    seeds advance automatically as soon as they pass their gate.

    Arguments:
        slots: names of the slots; none may be `all`
        blueprints: names of the blueprints
        ops: names of the ops; WAIT must be among them
        heads: names of the heads that are chosen; op must be among them
        fixed: option by head, for heads that are not chosen
        all_slots: whether the slot may also be `all`: the op then acts in every slot where it is legal
    """

    def __init__(
        self,
        *,
        slots: Sequence[str],
        blueprints: Sequence[str],
        ops: Sequence[str],
        heads: Sequence[str],
        fixed: Mapping[str, str],
        all_slots: bool = False,
    ) -> None:
        for key, names in (("slots", slots), ("blueprints", blueprints), ("ops", ops), ("heads", heads)):
            if not names or len(set(names)) != len(names):
                raise ValueError(f"actions.{key}={list(names)}: must name at least one, each once.")
        if ALL_SLOTS in slots:
            raise ValueError(f"actions.slots={list(slots)}: no slot may be named {ALL_SLOTS}, which is every slot.")
        _refuse_unknown("actions.ops", ops, tuple(Op.__members__))
        _refuse_unknown("actions.heads", heads, HEAD_NAMES)
        _refuse_unknown("actions.fixed", fixed, HEAD_NAMES)
        if "WAIT" not in ops:
            raise ValueError(f"actions.ops={list(ops)}: WAIT must be among them, because it is always legal.")
        self.ops: tuple[Op, ...] = tuple(op for op in Op if op.name in ops)
        self.slots: tuple[str, ...] = tuple(slots)
        self.all_slots: bool = all_slots
        run_options = {
            "op": {op.name: op.value for op in self.ops},
            "slot": {name: index for index, name in enumerate(self.slot_options)},
            "blueprint": {name: index for index, name in enumerate(blueprints)},
        }
        table = [
            _head(head.name, run_options[head.name], *head.ops) if head.name in run_options else head for head in HEADS
        ]
        self.heads: tuple[Head, ...] = tuple(head for head in table if head.name in heads)
        if self.heads[0].name != "op":
            raise ValueError(f"actions.heads={list(heads)}: op must be among them.")
        if "slot" not in heads and len(slots) > 1:
            raise ValueError(f"actions.heads={list(heads)}: slot must be among them if there are several slots.")
        if "slot" not in heads and all_slots:
            raise ValueError(f"actions.all_slots=true: slot must be among actions.heads={list(heads)}.")
        if Op.SET_ALPHA not in self.ops and ("alpha_target" in heads or fixed.get("alpha_target") != "FULL"):
            raise ValueError(
                "actions.fixed.alpha_target: must be FULL without SET_ALPHA, because alpha could never reach 1."
            )
        self.auto_advance: bool = Op.ADVANCE not in self.ops
        self._table: tuple[Head, ...] = tuple(table)
        self._fixed: dict[str, int] = {head.name: self._fixed_option(head, fixed) for head in table[1:]}

    def _fixed_option(self, head: Head, fixed: Mapping[str, str]) -> int:
        """The option of a head that is not chosen."""
        if head.name in fixed:
            _refuse_unknown(f"actions.fixed.{head.name}", [fixed[head.name]], head.options)
            return head.options.index(fixed[head.name])
        chosen = [head.name for head in self.heads]
        if head.name not in chosen and head.size > 1 and head.ops & set(self.ops):
            raise ValueError(
                f"actions.heads={chosen}: {head.name} is not chosen, so actions.fixed.{head.name} must name one of "
                f"{', '.join(head.options)}."
            )
        return 0

    @property
    def slot_options(self) -> tuple[str, ...]:
        """The options of the slot head: the slots, and `all` behind them if it may be chosen."""
        return (*self.slots, ALL_SLOTS) if self.all_slots else self.slots

    def present_slots(self, exists: Tensor) -> tuple[str, ...]:
        """The names of the slots that a host has; `exists` is bool [slots]."""
        return tuple(name for name, has_slot in zip(self.slots, exists.tolist(), strict=True) if has_slot)

    @property
    def blueprints(self) -> tuple[str, ...]:
        return self._table[HEAD_NAMES.index("blueprint")].options

    @property
    def head_names(self) -> tuple[str, ...]:
        return tuple(head.name for head in self.heads)

    def default_option(self, head: str) -> int:
        """Index of the option that a head takes where it is not chosen."""
        return self._fixed.get(head, 0)

    def uses(self, device: torch.device | None = None) -> Tensor:
        """Which heads each op uses: bool [ops, heads], in the order of `self.ops` and `self.heads`."""
        return torch.tensor([[op in head.ops for head in self.heads] for op in self.ops], device=device)

    def decode(self, action: Tensor) -> "Decision":
        """The values of an action [envs, heads], with fixed options filled in."""
        op = torch.tensor([int(op) for op in self.ops], device=action.device)[action[:, 0]]
        chosen = {head.name: index for index, head in enumerate(self.heads)}
        values: dict[str, Tensor] = {}
        for head in self._table[1:]:
            option = torch.full_like(op, self._fixed[head.name])
            if head.name in chosen:
                used = torch.isin(op, torch.tensor([int(user) for user in head.ops], device=op.device))
                option = torch.where(used, action[:, chosen[head.name]], option)
            values[head.name] = torch.tensor(head.values, dtype=head.dtype, device=op.device)[option]
        return Decision(op=op, **values)


@dataclass(frozen=True)
class Decision:
    """A decoded action; every field is [envs]. Durations are in ticks, `op` has Op values."""

    op: Tensor
    slot: Tensor  # index; the number of slots is all of them
    blueprint: Tensor
    blend: Tensor
    tempo: Tensor
    alpha_target: Tensor
    alpha_speed: Tensor
    alpha_curve: Tensor


def choice_name(op: str, slot: str | None) -> str:
    """The name of an op, followed by `all` if its slot is all of them."""
    return f"{op} {ALL_SLOTS}" if slot == ALL_SLOTS else op


def _refuse_unknown(key: str, names: Sequence[str] | Mapping[str, str], allowed: Sequence[str]) -> None:
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ValueError(f"{key}: {', '.join(unknown)} is unknown; allowed are {', '.join(allowed)}.")
