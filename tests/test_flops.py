"""The stated FLOPs of hosts and seeds match torch's FlopCounterMode; comments explain the exceptions."""

from collections.abc import Callable

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from esper.blueprints import Blueprint, blueprints
from esper.command_line import CONF
from esper.config import build, compose_config, load_preset
from esper.flops import Flops, attention_flops, conv_flops, linear_flops, symmetric_flops
from esper.growth import Seed
from esper.growth.seed import BlendGate
from esper.hosts import GPTHost, Host, variant_arguments
from esper.hosts.gpt import SelfAttention
from esper.lifecycle import Blend
from tests.fixtures_flops import counter

PRESETS = sorted(path.stem for path in (CONF / "host").glob("*.yaml") if "_target_" in path.read_text())  # single hosts
WIDTHS = {"cnn": (7, 48), "transformer": (12, 64)}
SEEDS = [
    (entry, channels, blend)
    for topology, widths in WIDTHS.items()
    for entry in blueprints(topology).values()
    for channels in widths
    for blend in Blend
]


def count_flops(run: Callable[..., Tensor], *arguments: object) -> tuple[int, int]:
    """FLOPs by torch's count: forward, and backward if the output requires a gradient."""
    with counter() as count:
        out = run(*arguments)
        forward = count.get_total_flops()
        if out.requires_grad:
            out.sum().backward()
    return forward, count.get_total_flops() - forward


def make_meta_host(preset: str, variant: str | None = None) -> tuple[Host, Tensor]:
    """A host on the meta device, and a sample for it."""
    with torch.device("meta"):
        host = load_preset(f"host/{preset}")
        if variant is not None:
            arguments = variant_arguments(type(host), compose_config(f"host/{preset}").host, variant)
            host = build(OmegaConf.create(arguments))
        if isinstance(host, GPTHost):
            return host, torch.zeros(1, host.block_size, dtype=torch.long)
        return host.eval(), torch.zeros(1, 3, 32, 32)  # in training, BatchNorm refuses the single value of cifar_colour


def surplus_of_groups(segment: nn.Module, x: Tensor) -> int:
    """What torch counts too many in a segment because it ignores the groups in weight gradients."""
    surplus = 0
    for layer in segment.children():
        if isinstance(layer, nn.Conv2d):
            sizes = layer.in_channels, layer.out_channels, layer.kernel_size[0], x.shape[2] * x.shape[3]
            surplus += (layer.groups - 1) * conv_flops(*sizes, groups=layer.groups).weight_grad
        x = layer(x)
    return surplus


@pytest.mark.parametrize("variant", [None, "wide1.5_deep1"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_stated_flops_of_every_segment_match_torchs_count(preset: str, variant: str | None) -> None:
    host, x = make_meta_host(preset, variant)
    stated = host.flops(x.shape[1:])
    assert stated is not None
    for index, (cost, segment) in enumerate(zip(stated, host.segments, strict=True)):
        forward, backward = count_flops(segment, x)
        attentions = sum(isinstance(module, SelfAttention) for module in segment.modules())
        if attentions:  # the meta device has no fused kernel, so scores are stored, which saves a product
            backward += attentions * attention_flops(host.slots[0].channels, x.shape[1]).forward // 2
        backward -= surplus_of_groups(segment, x)
        assert (cost.forward, cost.input_grad + cost.weight_grad) == (forward, backward), index
        x = segment(x).detach().requires_grad_()


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("entry", "channels", "blend"), SEEDS, ids=lambda value: getattr(value, "name", None))
def test_the_stated_flops_of_every_seed_match_torchs_count(
    entry: Blueprint, channels: int, blend: Blend, trains: bool
) -> None:
    topology = entry.topology
    x = torch.zeros((1, channels, 6, 5) if topology == "cnn" else (1, 12, channels), requires_grad=True)
    positions = 30 if topology == "cnn" else 12
    body = entry.build(channels)
    seed = Seed(body, blueprint=entry.name, blend=blend, channels=channels, topology=topology).requires_grad_(trains)
    assert entry.flops is not None
    cost = entry.flops(channels, positions)
    if blend is Blend.GATED:
        cost += BlendGate.flops(channels, topology, positions)
    forward, backward = count_flops(seed, x, 0.5)
    if entry.name in ("depthwise", "spatial") and trains:  # torch ignores the groups in the weight gradient
        backward -= (channels - 1) * conv_flops(channels, channels, 3, positions, groups=channels).weight_grad
    assert (cost.forward, cost.input_grad + trains * cost.weight_grad) == (forward, backward)


def test_flops_add_up() -> None:
    total = sum([Flops(1, 2, 3), Flops(10, 20, 30), symmetric_flops(100)], Flops())
    assert total == Flops(111, 122, 133)
    assert (total.frozen, total.total) == (233, 366)


def test_a_multiply_add_counts_as_two_flops() -> None:
    assert linear_flops(3, 5, 7) == symmetric_flops(2 * 3 * 5 * 7)
    assert conv_flops(4, 6, 3, 10) == symmetric_flops(2 * 4 * 6 * 9 * 10)
    assert conv_flops(4, 4, 3, 10, groups=4) == symmetric_flops(2 * 4 * 9 * 10)
    assert attention_flops(8, 5) == Flops(forward=2 * 2 * 25 * 8, input_grad=5 * 2 * 25 * 8)
