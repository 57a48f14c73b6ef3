"""Seeds behind modules of any network, by forward hooks.

A `HookedSlot` is a submodule of the network, so its seed moves, saves and trains with it. The hook of a slot without a
seed changes nothing.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.costs import slot_channels
from esper.growth.modes import Mode, run_seed
from esper.growth.seed import Seed, make_seed
from esper.lifecycle import Blend

CONTAINER = "esper_slots"  # name of the submodule with all slots
RANKS = {"cnn": 4, "transformer": 3}  # dimensions of the features


class HookedSlot(nn.Module):
    """A slot behind one module of a network.

    Arguments:
        name: full name of the module
        topology, channels: of its output
        channels_last: whether its output is in this memory format
        dtype: of its weights
        output: form of its output, and the place of the features in it, see `output_form`
        keywords: names of the keyword arguments that it was called with
    """

    alpha: Tensor

    def __init__(
        self,
        name: str,
        *,
        topology: str,
        channels: int,
        channels_last: bool = False,
        dtype: torch.dtype | None = None,
        output: tuple[str, int | str] = ("tensor", 0),
        keywords: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.name, self.topology, self.channels = name, topology, channels
        self.channels_last, self.dtype = channels_last, dtype or torch.get_default_dtype()
        self.output, self.keywords = output, tuple(keywords)
        self.seed: Seed | None = None
        self.mode = Mode.ISOLATED
        self.place: tuple[nn.Module, RemovableHandle] | None = None  # in a tuple, so that it is not a submodule
        self.register_buffer("alpha", torch.zeros(()), persistent=False)  # a tensor: no compilation when it changes

    def graft(self, blueprint: str, blend: Blend, *, rng_seed: int, device: torch.device) -> Seed:
        """Put a new seed into this empty slot; its initial weights follow from `rng_seed`. Main thread only."""
        if self.seed is not None:
            raise ValueError(f"slot={self.name}: must be empty, but has a seed; remove it first.")
        seed = make_seed(self.topology, blueprint, blend, self.channels, rng_seed=rng_seed)
        seed.to(device=device, dtype=self.dtype)
        if self.channels_last:
            seed.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
        self.seed = seed.train(self.training)
        self.alpha = self.alpha.to(device)
        self.set(Mode.ISOLATED, 0.0)
        return seed

    def attach(self, module: nn.Module) -> None:
        """Put the slot behind a module."""
        self.place = module, module.register_forward_hook(self.hook)

    def detach(self) -> None:
        """Remove the hook."""
        if self.place is not None:
            self.place[1].remove()
            self.place = None

    def remove(self) -> None:
        """Remove the seed."""
        self.seed = None
        self.set(Mode.ISOLATED, 0.0)

    def set(self, mode: Mode, alpha: float) -> None:
        """Set how the seed takes part in forward passes; `alpha` of an isolated seed is its target."""
        self.mode = mode
        self.alpha.fill_(alpha)

    def hook(self, module: nn.Module, inputs: object, output: Any) -> Any:
        """The forward hook of the module: its output with the features after the seed."""
        if self.seed is None:
            return None
        features = first_tensor(output)
        if features is None or features.ndim != RANKS[self.topology] or self._channels(features) != self.channels:
            shape = type(output).__name__ if features is None else list(features.shape)
            raise ValueError(
                f"slot={self.name}: the output must have {self.channels} channels as in the example, but is {shape}."
            )
        return replace_first_tensor(output, run_seed(self.seed, features, self.mode, self.alpha, coadapt=True))

    def extra_repr(self) -> str:
        return f"{self.name}, {self.topology}, channels={self.channels}"

    def _channels(self, features: Tensor) -> int:
        return slot_channels(self.topology, features)


def attach_slots(model: nn.Module, slots: Sequence[HookedSlot]) -> None:
    """Make slots part of a network."""
    if find_hooked_slots(model):
        raise ValueError("model: has slots of esper already; close its Grower or use esper.merge first.")
    modules = dict(model.named_modules())
    by_key = {slot.name.replace(".", "__") or "output": slot for slot in slots}
    if len(by_key) != len(slots):
        raise ValueError(f"slots={[slot.name for slot in slots]}: must differ in more than dots and underscores.")
    container = nn.ModuleDict(by_key)
    container.train(model.training)
    _holder(model).add_module(CONTAINER, container)
    for slot in slots:
        slot.attach(modules[slot.name])


def detach_slots(model: nn.Module) -> None:
    """Remove all slots and their hooks; the network is as it was without them."""
    for slot in find_hooked_slots(model).values():
        slot.detach()
    for module in list(model.modules()):
        if CONTAINER in dict(module.named_children()):
            delattr(module, CONTAINER)


def find_hooked_slots(model: nn.Module) -> dict[str, HookedSlot]:
    """The slots of a network, by the name of their module."""
    return {module.name: module for module in model.modules() if isinstance(module, HookedSlot)}


def take_seed_weights(state: dict[str, Any]) -> dict[str, Any]:
    """Move the entries of seeds out of a network's state, such as for loading it before the seeds are there.

    Load them with `strict=False` as soon as the structure is rebuilt.
    """
    return {name: state.pop(name) for name in list(state) if CONTAINER in name.split(".")}


@contextmanager
def without_seeds(model: nn.Module, names: Sequence[str] | None = None) -> Iterator[None]:
    """Context in which seeds are switched off: alpha is 0, so that a compiled network is not compiled again.

    Arguments:
        model: the network
        names: of the slots; None is all
    """
    slots = [slot for name, slot in find_hooked_slots(model).items() if names is None or name in names]
    before = [slot.alpha.item() for slot in slots]
    for slot in slots:
        slot.alpha.zero_()
    try:
        yield
    finally:
        for slot, alpha in zip(slots, before, strict=True):
            slot.alpha.fill_(alpha)


def output_form(output: Any) -> tuple[str, int | str] | None:
    """The form of a module's output, and the place of the first tensor in it; None if it has none.

    Forms are tensor, tuple, list, namedtuple, dataclass and mapping.
    """
    if isinstance(output, Tensor):
        return "tensor", 0
    if isinstance(output, tuple | list):
        found = next((index for index, value in enumerate(output) if isinstance(value, Tensor)), None)
        if found is None:
            return None
        fields = getattr(output, "_fields", None)
        return ("namedtuple", fields[found]) if fields else ("tuple" if isinstance(output, tuple) else "list", found)
    if dataclasses.is_dataclass(output):
        names = [field.name for field in dataclasses.fields(output) if isinstance(getattr(output, field.name), Tensor)]
        return ("dataclass", names[0]) if names else None
    names = [key for key, value in output.items() if isinstance(value, Tensor)] if isinstance(output, Mapping) else []
    return ("mapping", names[0]) if names else None


def first_tensor(output: Any) -> Tensor | None:
    """The features in a module's output: a tensor, or the first one of a tuple, a list, a mapping or a dataclass."""
    form = output_form(output)
    if form is None:
        return None
    features: Tensor = _take(output, *form)
    return features


def replace_first_tensor(output: Any, features: Tensor) -> Any:
    """A copy of a module's output with other features."""
    found = output_form(output)
    assert found is not None
    form, key = found
    if form == "tensor":
        return features
    if form in ("tuple", "list"):
        return type(output)(features if index == key else value for index, value in enumerate(output))
    if form == "mapping":
        return {**output, key: features}
    replace = output._replace if form == "namedtuple" else partial(dataclasses.replace, output)
    return replace(**{str(key): features})


def _take(output: Any, form: str, key: int | str) -> Any:
    if form == "tensor":
        return output
    return getattr(output, str(key)) if form in ("namedtuple", "dataclass") else output[key]


def _holder(model: nn.Module) -> nn.Module:
    """The module that slots are a child of: the first that does not run its children in turn."""
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    for module in model.modules():
        if not isinstance(module, containers):
            return module
    raise ValueError(f"model={type(model).__name__}: must have at least one layer.")
