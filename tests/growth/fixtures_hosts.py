"""Small growing hosts, their batches, losses and optimizers."""

from functools import partial

import torch
from torch import Tensor, nn

from esper.blueprints import blueprints
from esper.growth import GrowingHost, GrowthOptimizer, LRSchedule, Mode, SeedSetting, SeedSettings
from esper.hosts import CNNHost, GPTHost, Host
from esper.lifecycle import Blend

CASES = [
    (topology, channels, blueprint, blend)
    for topology, sizes in (("cnn", (7, 32)), ("transformer", (64,)))
    for channels in sizes
    for blueprint in blueprints(topology)
    for blend in Blend
]
MIDDLE = {"cnn": "block1", "transformer": "segment1"}
ISOLATED = SeedSetting(Mode.ISOLATED, 1.0)
FULL = SeedSetting(Mode.BLENDED, 1.0)


def host(topology: str, channels: int, dropout: float) -> Host:
    torch.manual_seed(0)
    if topology == "cnn":
        return CNNHost(blocks=2, channels=channels, kernel=3, pools=2, pool_slots=False, resolution=16, classes=10)
    return GPTHost(vocabulary=40, channels=channels, heads=4, layers=2, segments=2, block_size=12, dropout=dropout)


def model(topology: str, channels: int, *, coadapt: bool = True, dropout: float = 0.0) -> GrowingHost:
    return GrowingHost(host(topology, channels, dropout), coadapt=coadapt)


def batch(topology: str, index: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    if topology == "cnn":
        return torch.randn(8, 3, 16, 16, generator=generator), torch.randint(10, (8,), generator=generator)
    tokens = torch.randint(40, (4, 13), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), targets.flatten())


def backward(growing: GrowingHost, settings: SeedSettings, index: int = 0) -> dict[str, Tensor]:
    """Backward pass of one batch for host and seeds; returns the losses, the host's as "host"."""
    x, y = batch(growing.host.topology, index)
    host_loss, isolated = growing.losses(x, settings, lambda output: loss(output, y))
    (host_loss + sum(isolated.values())).backward()
    return {name: value.detach() for name, value in ({"host": host_loss} | isolated).items()}


def optimizer(growing: GrowingHost, kind: str = "sgd", fused: bool = True, **changes: float) -> GrowthOptimizer:
    build = {
        "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4),
        "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1, fused=fused),
    }[kind]
    schedule, seed_lr = LRSchedule(shape="constant", warmup=0.0, final=0.0), {"sgd": 0.05, "adamw": 0.01}[kind]
    seeds = {"seed_lr": seed_lr, "seed_weight_decay": 0.0}
    return GrowthOptimizer(growing, build=build, clip=1.0, schedule=schedule, **seeds, **changes)


def fill_with_nan(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)


def host_gradients(growing: GrowingHost) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in growing.host.named_parameters() if p.grad is not None}


def all_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
