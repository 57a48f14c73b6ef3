"""Widen a host without changing its function: Net2WiderNet (Chen et al., 2016, arXiv:1511.05641)."""

import torch
from torch import Tensor, nn

from esper.growth.model import GrowingHost
from esper.hosts import CNNHost, Host

WIDTH_SETTINGS = (  # of torch's layers
    "in_channels", "out_channels", "groups", "num_features", "in_features", "out_features",
)  # fmt: skip
Layer = nn.Conv2d | nn.Linear | nn.BatchNorm2d  # those that have weights


def widened(model: GrowingHost, wide: Host, generator: torch.Generator) -> GrowingHost:
    """A growing host around `wide`, which gets the weights, device and mode of the model's host (`widen_host`).

    The optimizer of the model does not fit the result: build a new one.
    """
    if model.seeds:
        raise ValueError(f"widen: the host must have no seeds, but has some in {', '.join(model.seeds)}.")
    wide.to(next(model.host.parameters()).device)
    widen_host(model.host, wide, generator)
    return GrowingHost(wide, coadapt=model.coadapt).train(model.training)


def widen_host(narrow: Host, wide: Host, generator: torch.Generator) -> None:
    """Set the weights of a wider host so that it computes the function of a narrow one, up to rounding.

    Each further channel is a copy of one that is chosen at random, with its normalisation and running statistics. The
    next layer divides the weight of a channel among its copies, in random shares that sum to 1. Shares differ between
    copies and between outputs, so that the copies get different gradients. A convolution with a group for each input
    sums no channels: it is copied with its inputs, and a later layer divides its weights.

    Arguments:
        narrow: the host that is widened; does not change
        wide: a host of the same class, layers and slots, with at least as many channels in every layer
        generator: draws copies and shares; on the CPU
    """
    if not isinstance(narrow, CNNHost):
        raise ValueError(
            f"widen: {type(narrow).__name__} cannot be widened without changing its function; only CNNHost can."
        )
    layers = _pair_layers(narrow, wide)
    sources = torch.arange(layers[0][0].weight.shape[1])  # the narrow channel of which each wide channel is a copy
    with torch.no_grad():
        for old, new in layers:
            state = {name: value.cpu() for name, value in old.state_dict().items()}
            if isinstance(old, nn.BatchNorm2d):
                values = {name: value[sources] if value.ndim else value for name, value in state.items()}
            elif isinstance(old, nn.Conv2d) and isinstance(new, nn.Conv2d) and new.groups > 1:
                per_group = old.out_channels // old.groups
                sources = (sources[:, None] * per_group + torch.arange(per_group)).flatten()
                values = {name: value[sources] for name, value in state.items()}
            else:
                outputs = _choose_sources(len(old.weight), len(new.weight), generator)
                values = {name: value[outputs] for name, value in state.items()}
                shares = _draw_shares(sources, len(outputs), generator)
                weight = values["weight"][:, sources]
                values["weight"] = weight * shares.reshape(*shares.shape, *[1] * (weight.ndim - 2))
                sources = outputs
            for name, value in new.state_dict(keep_vars=True).items():
                value.copy_(values[name])


def _choose_sources(narrow: int, wide: int, generator: torch.Generator) -> Tensor:
    """The narrow channel of each wide channel [wide]: the same at first, then in random order, equally often."""
    chosen = [torch.arange(narrow)]
    while narrow * len(chosen) < wide:
        chosen.append(torch.randperm(narrow, generator=generator))
    return torch.cat(chosen)[:wide]


def _draw_shares(sources: Tensor, outputs: int, generator: torch.Generator) -> Tensor:
    """Shares [outputs, channels] that sum to 1 over the copies of a channel; exactly 1 without copies."""
    parts = 0.5 + torch.rand(outputs, len(sources), dtype=torch.float64, generator=generator)
    totals = torch.zeros(outputs, int(sources.max()) + 1, dtype=torch.float64).index_add_(1, sources, parts)
    return parts / totals[:, sources]


def _pair_layers(narrow: Host, wide: Host) -> list[tuple[Layer, Layer]]:
    """The layers with weights of both hosts, in order; raises ValueError if `wide` is not a wider `narrow`."""
    structures = [
        (type(host), [slot.name for slot in host.slots], list(host.state_dict()), list(map(_settings, _leaves(host))))
        for host in (narrow, wide)
    ]
    if structures[0] != structures[1]:
        raise ValueError("widen: the wide host must have the class, the layers and the slots of the narrow one.")
    pairs: list[tuple[Layer, Layer]] = []
    for old, new in zip(_leaves(narrow), _leaves(wide), strict=True):
        if not old.state_dict():
            continue
        if not (isinstance(old, Layer) and isinstance(new, Layer) and _have_equal_grouping(old, new)):
            raise ValueError(
                f"widen: {old} cannot be widened to {new}; only BatchNorm, linear layers, and convolutions without "
                "groups or with a group for each input can."
            )
        if len(new.weight) < len(old.weight):
            raise ValueError(f"widen: the wide host must have at least {len(old.weight)} channels in {new}.")
        pairs.append((old, new))
    outputs = [len(layer.weight) for layer in pairs[-1]]
    if outputs[0] != outputs[1]:
        raise ValueError(f"widen: the wide host must have {outputs[0]} outputs, not {outputs[1]}.")
    return pairs


def _have_equal_grouping(old: Layer, new: Layer) -> bool:
    """Whether two layers have no groups, or both a group for each input, with equally many outputs."""
    if not (isinstance(old, nn.Conv2d) and isinstance(new, nn.Conv2d)) or old.groups == new.groups == 1:
        return True
    has_group_for_each_input = all(layer.groups == layer.in_channels for layer in (old, new))
    return has_group_for_each_input and old.weight.shape[0] * new.groups == new.weight.shape[0] * old.groups


def _leaves(host: Host) -> list[nn.Module]:
    return [module for module in host.modules() if not list(module.children())]


def _settings(layer: nn.Module) -> tuple[type[nn.Module], dict[str, object]]:
    """What a layer is, apart from its width."""
    public = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    return type(layer), {name: value for name, value in public.items() if name not in (*WIDTH_SETTINGS, "training")}
