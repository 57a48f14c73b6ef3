"""Where a network can grow: modules whose output a seed can follow, their shapes and their share of the cost."""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from esper.blueprints import Blueprint, blueprints
from esper.grow.tracing import Run, Trace, trace_network
from esper.growth import make_seed
from esper.lifecycle import Blend
from esper.rng import derive_seed

SLOT_RULES = "[batch, channels, height, width] or [batch, time, channels]"
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class SlotInfo:
    """A place where a network can grow."""

    name: str
    shape: tuple[int, ...]  # of the output of its module for the example
    topology: Literal["cnn", "transformer"]
    channels: int
    channels_last: bool
    output: tuple[str, int | str]  # form of its output, and the place of the features in it
    keywords: tuple[str, ...]  # names of its keyword arguments
    cost: float  # share of the FLOPs between the slot before and this one
    blueprints: tuple[str, ...]  # that fit

    @property
    def features(self) -> Tensor:
        """One sample of the features, on the meta device."""
        return torch.empty(1, *self.shape[1:], device="meta")


class SlotTable(Sequence[SlotInfo]):
    """The slots of a network in the order of its forward pass; prints as a table."""

    def __init__(self, slots: Sequence[SlotInfo], trace: Trace) -> None:
        self.trace = trace
        self._slots = tuple(slots)

    def __getitem__(self, index: Any) -> Any:
        return self._slots[index]

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[SlotInfo]:
        return iter(self._slots)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self)

    @property
    def topology(self) -> str:
        return self._slots[0].topology

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without what is known of other modules."""
        return {"slots": [asdict(slot) for slot in self], "trace": asdict(replace(self.trace, uses={}))}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "SlotTable":
        return cls([SlotInfo(**slot) for slot in saved["slots"]], Trace(**saved["trace"]))

    def __repr__(self) -> str:
        rows = [("slot", "output", "topology", "channels", "cost", "blueprints")]
        rows += [
            (each.name, " x ".join(map(str, each.shape)), each.topology, str(each.channels), f"{each.cost:.0%}",
             ", ".join(each.blueprints))
            for each in self
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def find_slots(
    model: nn.Module,
    example: Any,
    *,
    slots: str | Sequence[str] = "auto",
    exclude: str | Sequence[str] = (),
    blueprints: Sequence[str] | None = None,
    causal: bool = False,
    run: Run | None = None,
) -> SlotTable:
    """The slots of a network, as a table: name, output, topology, channels, share of the cost, blueprints that fit.

    Arguments:
        model: any network
        example: a batch: what its forward method takes, or a tuple or mapping that begins with that
        slots: names of modules, whole or from a dot on; a regular expression, if it is a string; `auto` is the outputs
            of stages
        exclude: modules that are left out, named like `slots`
        blueprints: that may grow; None is all that fit
        causal: whether no output may depend on later positions, as in a language model; seeds that mix positions of a
            text are causal, and are used only there, or where `blueprints` names them
        run: runs the model with the example; None calls it
    """
    trace = trace_network(model, example, run)
    names = choose_modules(model, trace, slots, exclude)
    topologies = {trace.uses[name].topology for name in names}
    if len(topologies) > 1:
        raise ValueError(f"slots={names}: must all have images or all have texts, not both; choose with slots=.")
    total, last, found = max(1, trace.uses[names[-1]].end, *(use.end for use in trace.uses.values())), 0, []
    for name in names:
        use = trace.uses[name]
        assert use.shape is not None
        channels = use.shape[1] if use.topology == "cnn" else use.shape[-1]
        fitting = fitting_blueprints(str(use.topology), channels, blueprints, causal)
        if not fitting:
            raise ValueError(f"slots: none of blueprints={blueprints or 'all'} fits {name} with {channels} channels.")
        assert use.output is not None
        topology: Literal["cnn", "transformer"] = "cnn" if use.topology == "cnn" else "transformer"
        cost = (use.end - last) / total
        found.append(
            SlotInfo(
                name, use.shape, topology, channels, use.channels_last, use.output, use.keywords, cost, fitting
            )
        )  # fmt: skip
        last = use.end
    return SlotTable(found, trace)


def choose_modules(
    model: nn.Module, trace: Trace, slots: str | Sequence[str], exclude: str | Sequence[str]
) -> list[str]:
    """Names of the modules that `slots` means, in the order of the forward pass."""
    names = [name for name, _ in model.named_modules() if name]
    excluded = set(match_names(names, exclude, "exclude")) if exclude else set()
    if slots == "auto":
        chosen = automatic_slots(model, trace, excluded)
    else:
        chosen = [name for name in match_names(names, slots, "slots") if name not in excluded]
        if isinstance(slots, str):  # a regular expression also means modules that were not meant
            chosen = [name for name in chosen if _problem(trace, name) is None] or chosen
    for name in chosen:
        problem = _problem(trace, name)
        if problem is not None:
            raise ValueError(f"slots: {name} {problem}.")
    if not chosen:
        raise ValueError(f"slots={slots!r}, exclude={exclude!r}: must leave at least one module.")
    order = list(trace.uses)
    return sorted(chosen, key=order.index)


def match_names(names: Sequence[str], wanted: str | Sequence[str], key: str) -> list[str]:
    """The names that match: a string is a regular expression, an entry of a list is a name or its end after a dot."""
    if isinstance(wanted, str):
        try:
            found = [name for name in names if re.fullmatch(wanted, name)]
        except re.error as error:
            raise ValueError(f"{key}={wanted!r}: must be a regular expression or a list of names ({error}).") from None
        if not found:
            raise ValueError(f"{key}={wanted!r}: matches no module; {_nearest(names, wanted)}.")
        return found
    result: dict[str, None] = {}
    for entry in wanted:
        found = [name for name in names if name == entry or name.endswith(f".{entry}")]
        if not found:
            raise ValueError(f"{key}: {entry!r} matches no module; {_nearest(names, entry)}.")
        result |= dict.fromkeys(found)
    return list(result)


def automatic_slots(model: nn.Module, trace: Trace, excluded: set[str]) -> list[str]:
    """The outputs of stages: siblings with layers of their own and outputs of equal rank, that cost the most together.

    Without such siblings, the last output of each shape.
    """
    modules = dict(model.named_modules())
    usable = [name for name in trace.uses if name not in excluded and _problem(trace, name) is None]
    groups: dict[tuple[str, str | None], list[str]] = {}
    for name in usable:
        if any(True for _ in modules[name].children()) and any(True for _ in modules[name].parameters()):
            groups.setdefault((name.rpartition(".")[0], trace.uses[name].topology), []).append(name)
    stages = [group for group in groups.values() if len(group) > 1]
    if stages:
        cost = {id(group): sum(trace.uses[name].end - trace.uses[name].start for name in group) for group in stages}
        return max(stages, key=lambda group: (cost[id(group)], -group[0].count(".")))
    last: dict[tuple[int, ...], str] = {}
    for name in usable:
        shape = trace.uses[name].shape
        assert shape is not None
        if not isinstance(modules[name], CONTAINERS):
            last.pop(shape, None)
            last[shape] = name
    if not last:
        raise ValueError(f"slots=auto: no module has an output {SLOT_RULES}; name some with slots=.")
    topology = trace.uses[next(iter(last.values()))].topology
    return [name for name in last.values() if trace.uses[name].topology == topology]


def fitting_blueprints(topology: str, channels: int, wanted: Sequence[str] | None, causal: bool) -> tuple[str, ...]:
    """Names of the blueprints that can be built for some channels; a name that does not exist is refused."""
    known = blueprints(topology)
    for name in wanted or ():
        if name not in known:
            raise ValueError(
                f"blueprints: {name} is unknown among {topology} blueprints; allowed are {', '.join(known)}."
            )
    entries = [known[name] for name in wanted] if wanted is not None else [
        entry for entry in known.values() if causal or topology == "cnn" or "sequence" not in entry.kinds
    ]  # fmt: skip
    return tuple(entry.name for entry in entries if _can_build(entry, channels))


def _problem(trace: Trace, name: str) -> str | None:
    """Why a module cannot be a slot; None if it can."""
    use = trace.uses.get(name)
    if use is None:
        return "does not run in a forward pass of the example"
    if use.calls > 1:
        return f"runs {use.calls} times in one forward pass; it must run once"
    if use.topology is None:
        shape = "no tensor" if use.shape is None else f"the shape {list(use.shape)}"
        return f"has an output of {shape}; it must be {SLOT_RULES}"
    return None


def _nearest(names: Sequence[str], wanted: str) -> str:
    near = difflib.get_close_matches(wanted, [*names], n=3, cutoff=0.3)
    return f"the nearest are {', '.join(near)}" if near else f"modules are {', '.join(names[:10])}"


def _can_build(entry: Blueprint, channels: int) -> bool:
    try:
        with torch.device("meta"):
            make_seed(entry.topology, entry.name, Blend.ADD, channels, rng_seed=derive_seed("slots", 0))
    except ValueError:
        return False
    return True
