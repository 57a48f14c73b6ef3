"""Make seeds a part of the network: afterwards it is an ordinary module without hooks, and needs no esper.

A seed becomes a graph of torch's own modules (torch.fx). Behind a plain Sequential it is one more layer of it;
elsewhere a small graph runs the module, then the seed.
"""

import copy
import dataclasses
import inspect
import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from esper.grow.network import unwrap
from esper.growth import HookedSlot, Mode, Seed, detach_slots, find_hooked_slots
from esper.growth.seed import OPERATORS
from esper.lifecycle import Blend


class _FixedSeed(nn.Module):
    """A seed at its alpha, without what cannot be traced."""

    alpha: Tensor

    def __init__(self, seed: Seed, alpha: Tensor) -> None:
        super().__init__()
        self.seed, self.is_whole = seed, seed.blend is Blend.ADD and alpha.item() == 1
        self.register_buffer("alpha", alpha.detach().clone())  # rounded with the features, as by the hook

    def forward(self, h: Tensor) -> Tensor:
        s: Tensor = self.seed.body(h).to(h.dtype)
        if self.is_whole:
            return s  # what a cross-fade is at the end
        return OPERATORS[self.seed.blend](self.seed, h, s, self.alpha.to(h.dtype))


def merge_seeds(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """A copy of a network in which seeds are ordinary layers: without hooks, and with bit-equal outputs.

    It can be saved, exported and loaded with torch alone. Seeds that still train in isolation are left out.

    Arguments:
        model: the network
        inplace: change the network itself instead of a copy; its Grower must be closed
    """
    merged = unwrap(model) if inplace else copy.deepcopy(unwrap(model))
    slots = [slot for slot in find_hooked_slots(merged).values() if slot.seed is not None]
    places = [(slot, slot.place[0]) for slot in slots if slot.place is not None]
    detach_slots(merged)
    for slot, module in places:
        if slot.mode is Mode.ISOLATED or slot.alpha.item() == 0:
            continue
        assert slot.seed is not None
        grown = trace_seed(slot.seed, slot.alpha)
        _replace_everywhere(merged, module, _join(module, grown, slot))
    return merged


def trace_seed(seed: Seed, alpha: Tensor) -> nn.Module:
    """A seed at a fixed alpha as a graph of torch's modules.

    The module of a blueprint of the user's own that cannot be traced stays one module, of the user's class.
    """
    fixed = _FixedSeed(seed, alpha).train(seed.training)

    class OneModule(fx.Tracer):  # a local class is not stored with the graph
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return m is seed.body or super().is_leaf_module(m, module_qualified_name)

    with torch.no_grad():  # so that no branch depends on whether a value needs a gradient
        try:
            return fx.symbolic_trace(fixed)
        except (fx.proxy.TraceError, TypeError, RuntimeError, NameError):
            return fx.GraphModule(fixed, OneModule().trace(fixed), "Seed")


def _join(module: nn.Module, seed: nn.Module, slot: HookedSlot) -> nn.Module:
    """A module that runs `module` and passes its features through the seed."""
    if type(module) is nn.Sequential:
        module.append(seed)  # the names of its other parameters stay the same
        return module
    every = list(inspect.signature(module.forward).parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in every):
        raise ValueError(f"slot={slot.name}: cannot be merged, because its forward method takes *{every[0].name}.")
    graph, positional = fx.Graph(), []
    named: dict[str, Any] = {}
    for parameter in every:
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        is_required = parameter.default is inspect.Parameter.empty
        value = graph.placeholder(parameter.name, None, *([] if is_required else [parameter.default]))
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            named[parameter.name] = value
        else:
            positional.append(value)
    known = {parameter.name for parameter in every}
    named |= {name: graph.placeholder(name, None, None) for name in slot.keywords if name not in known}
    out = graph.call_module("module", tuple(positional), named)
    graph.output(_with_seed(graph, out, slot))
    return fx.GraphModule({"module": module, "seed": seed}, graph, "WithSeed")


def _with_seed(graph: fx.Graph, out: fx.Node, slot: HookedSlot) -> fx.Node:
    """The output of a module with the features after the seed, in the form that it had for the example."""
    form, key = slot.output

    def seed(features: fx.Node) -> fx.Node:
        return graph.call_module("seed", (features,))

    if form == "tensor":
        return seed(out)
    if form in ("tuple", "list"):
        before = graph.call_function(operator.getitem, (out, slice(None, key)))
        after = graph.call_function(operator.getitem, (out, slice(int(key) + 1, None)))
        features = seed(graph.call_function(operator.getitem, (out, key)))
        middle: Any = (features,) if form == "tuple" else [features]
        return graph.call_function(operator.add, (graph.call_function(operator.add, (before, middle)), after))
    if form == "mapping":
        features = seed(graph.call_function(operator.getitem, (out, key)))
        return graph.call_function(operator.or_, (out, {str(key): features}))
    features = seed(graph.call_function(getattr, (out, key)))
    if form == "namedtuple":
        return graph.call_method("_replace", (out,), {str(key): features})
    return graph.call_function(dataclasses.replace, (out,), {str(key): features})


def _replace_everywhere(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module where another one is, in each place that it has."""
    if old is new:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old and parent is not new:
                setattr(parent, name, new)
