import pytest
import torch
from torch import Tensor, nn

from esper.blueprints import Blueprint, blueprints

CASES = [
    *[(entry, channels) for entry in blueprints("cnn").values() for channels in (7, 32)],
    *[(entry, 64) for entry in blueprints("transformer").values()],
]


def features(entry: Blueprint, channels: int) -> Tensor:
    shape = (4, channels, 8, 8) if entry.topology == "cnn" else (4, 12, channels)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x.relu().contiguous(memory_format=torch.channels_last) if entry.topology == "cnn" else x


@pytest.mark.parametrize(("entry", "channels"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_new_seed_is_the_identity_and_changes_its_input_once_trained(entry: Blueprint, channels: int) -> None:
    torch.manual_seed(0)
    seed, x = entry.build(channels), features(entry, channels)
    assert torch.equal(seed(x), x)
    optimizer = torch.optim.SGD(seed.parameters(), lr=0.1)
    target = features(entry, channels).roll(1, 0) * 1.5
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(seed(x), target).backward()
        optimizer.step()
    assert seed(x).shape == x.shape
    assert not torch.equal(seed(x), x)
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in seed.parameters())


@pytest.mark.parametrize("entry", blueprints("transformer").values(), ids=lambda entry: entry.name)
def test_a_transformer_seed_is_causal(entry: Blueprint) -> None:
    torch.manual_seed(0)
    seed, x = entry.build(64), features(entry, 64)
    for parameter in seed.parameters():
        nn.init.normal_(parameter, std=0.1)
    changed = x.clone()
    changed[:, 7:] += 1
    assert torch.equal(seed(x)[:, :7], seed(changed)[:, :7])
    assert not torch.equal(seed(x)[:, 7:], seed(changed)[:, 7:])
