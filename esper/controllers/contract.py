"""The contract of a trained policy, by name: its weights fit any layout that has the same kind of features.

Checkpoints have the names of features, ops, heads, options and blueprints, and what each blueprint does. Where a policy
is loaded, weights are mapped by these names: a feature that is new gets zero weights, one that is gone is dropped, a
blueprint that was never seen or does something else is unknown, and an op, option or head that was never trained is not
chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from esper.controllers.policy import Policy
from esper.lifecycle import ALL_SLOTS, Layout

UNKNOWN_NAME = "unknown"  # first row of the embedding of blueprints


@dataclass(frozen=True)
class NamedAxis:
    """An axis of a weight whose first or last entries have names; the others have a fixed meaning."""

    axis: int
    names: tuple[str, ...]
    default: float | str = 0.0  # for a new name: a number, or the name of the entry that is copied
    is_last: bool = False  # whether the names are those of the last entries


def named_axes(layout: Layout) -> dict[str, NamedAxis]:
    """The axes with names of a policy's weights, by weight."""
    axes = {
        "base_statistics.mean": NamedAxis(0, layout.base),
        "base_statistics.variance": NamedAxis(0, layout.base, 1.0),
        "slot_statistics.mean": NamedAxis(0, layout.slot),
        "slot_statistics.variance": NamedAxis(0, layout.slot, 1.0),
        "candidates.describe.weight": NamedAxis(1, layout.candidate),
        "candidates.names.weight": NamedAxis(0, (UNKNOWN_NAME, *layout.blueprints), UNKNOWN_NAME),
        "slot.encode.weight": NamedAxis(1, layout.slot),
        "features.0.weight": NamedAxis(1, layout.base_inputs),
        "all_slots.bias": NamedAxis(0, layout.ops),
    }
    for head, options in layout.options.items():
        if head == "blueprint":
            continue  # its output is a query that is compared with candidates
        is_first = head in ("op", "slot")
        outputs = layout.ops if is_first else options
        axes |= {f"heads.{head}.2.{part}": NamedAxis(0, outputs) for part in ("weight", "bias")}
        if not is_first:
            axes[f"heads.{head}.0.weight"] = NamedAxis(1, layout.users[head], is_last=True)
    return axes


def check_transferable(saved: Layout, current: Layout, argument: str) -> None:
    """Refuse a policy that cannot act in this layout; `argument` is the key and value that name it."""
    if saved.features != current.features:
        raise ValueError(
            f"{argument}: was trained with environment.features={saved.features}, but this task has "
            f"{current.features}; they must be the same."
        )
    if not set(saved.ops) & set(current.ops):
        raise ValueError(
            f"{argument}: was trained with ops {', '.join(saved.ops)}, of which this task has none "
            f"({', '.join(current.ops)})."
        )
    if current.ops[0] not in saved.ops:  # WAIT, the only op that is always legal
        raise ValueError(f"{argument}: was trained without the op {current.ops[0]}, which this task needs.")
    for head, options in current.options.items():
        is_open = head in ("slot", "blueprint") or head not in saved.options
        if not is_open and not set(options) & set(saved.options[head]):
            raise ValueError(
                f"{argument}: was trained with {head} options {', '.join(saved.options[head])}, of which this task has "
                f"none ({', '.join(options)})."
            )


def map_weights(saved: Layout, weights: Mapping[str, Tensor], policy: Policy) -> dict[str, Tensor]:
    """The weights of a policy with another layout, for this policy; weights that it does not have are not returned.

    With equal layouts the weights are returned as they are.
    """
    before, now = named_axes(_without_changed(saved, policy.layout)), named_axes(policy.layout)
    expected = policy.state_dict()
    return {
        name: _map_axis(weight, before[name], now[name]) if name in now and name in before else weight
        for name, weight in weights.items()
        if name in expected
    }


def changed_blueprints(saved: Layout, current: Layout) -> list[str]:
    """Blueprints of the same name that do something else now, as far as the checkpoint has what they did."""
    both = [name for name in saved.blueprints if name in saved.traits and name in current.traits]
    return [name for name in both if saved.traits[name] != current.traits[name]]


def _without_changed(saved: Layout, current: Layout) -> Layout:
    """A blueprint that has changed is another one: what was learned of its name is of no use."""
    changed = changed_blueprints(saved, current)
    names = (f"{name}, as it was" if name in changed else name for name in saved.blueprints)
    return replace(saved, blueprints=tuple(names))


def known_options(saved: Layout, current: Layout) -> dict[str, Tensor]:
    """The options that a policy may choose in another layout: bool [options] by head, without heads that are all true.

    A head that is new takes its default option.
    """
    known = {}
    for head, options in current.options.items():
        if head == "slot" and current.all_slots and not saved.all_slots:
            known[head] = torch.tensor([option != ALL_SLOTS for option in options])
        if head in ("slot", "blueprint"):
            continue  # chosen by what they are like, not by their names
        allowed = saved.options[head] if head in saved.options else (current.defaults[head],)
        mask = [option in allowed for option in options]
        if not all(mask):
            known[head] = torch.tensor(mask)
    return known


def contract_differences(saved: Layout, current: Layout) -> list[str]:
    """What a policy does not know of this layout, and what it knows that is not there; empty if nothing differs."""
    pairs: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "feature": ((*saved.base, *saved.slot), (*current.base, *current.slot)),
        "op": (saved.ops, current.ops),
        "head": (saved.head_names, current.head_names),
        "slot option": ([ALL_SLOTS] * saved.all_slots, [ALL_SLOTS] * current.all_slots),
        "blueprint": (saved.blueprints, current.blueprints),
    }
    lines = []
    for kind, (before, now) in pairs.items():
        for label, names in (("new", set(now) - set(before)), ("gone", set(before) - set(now))):
            if names:
                lines.append(f"{label} {kind}: {', '.join(sorted(names))}")
    if changed := changed_blueprints(saved, current):
        lines.append(f"changed blueprint: {', '.join(changed)}")
    return lines


def _map_axis(weight: Tensor, before: NamedAxis, now: NamedAxis) -> Tensor:
    """Reorder one axis of a weight by name; entries without a name stay as they are."""
    if before.names == now.names:
        return weight
    rows, size = weight.transpose(0, before.axis), len(before.names)
    others = list(rows[:-size] if before.is_last else rows[size:])
    start = len(others) if before.is_last else 0
    position = {name: start + index for index, name in enumerate(before.names)}

    def entry(name: str) -> Tensor:
        if name in position:
            return rows[position[name]]
        if isinstance(now.default, str):
            return rows[position[now.default]]
        return torch.full_like(rows[0], now.default)

    named = [entry(name) for name in now.names]
    mapped = [*others, *named] if before.is_last else [*named, *others]
    return torch.stack(mapped).transpose(0, before.axis).contiguous()
