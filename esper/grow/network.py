"""The user's network: what is refused, what is inside of wrappers, and how to recognise it again."""

import hashlib
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from esper.growth import HookedSlot

SHARDED = ("FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")  # names of classes that shard parameters
COMPILED = "_orig_mod"  # the child of a compiled network that is the network


def refuse_network(model: Any) -> None:
    """Refuse what cannot grow."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={type(model).__name__}: must be a torch.nn.Module.")
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if found := kinds & set(SHARDED):
            raise ValueError(
                f"model: contains {', '.join(sorted(found))}; must be on one device or in DistributedDataParallel, "
                "because sharded parameters cannot be added to."
            )


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside of torch.compile and DistributedDataParallel."""
    while True:
        compiled = dict(model.named_children()).get(COMPILED)
        if compiled is not None:
            model = compiled
        elif isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        else:
            return model


def base_digest(model: nn.Module) -> str:
    """A digest of the names and shapes of a network's parameters, without those of seeds."""
    own = {id(parameter) for slot in model.modules() if isinstance(slot, HookedSlot) for parameter in slot.parameters()}
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if id(parameter) not in own:
            digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
    return digest.hexdigest()


def check_arguments(steps: int, mode: str, **limits: float | None) -> None:
    """Refuse arguments of a Grower that are out of range."""
    if steps < 1:
        raise ValueError(f"steps={steps}: must be at least 1.")
    if mode not in ("max", "min"):
        raise ValueError(f"mode={mode}: must be max or min.")
    for key, value in limits.items():
        least = 1.0 if key == "max_parameters" else 0.0
        if value is not None and not value >= least:
            raise ValueError(f"{key}={value}: must be at least {least:g}.")
