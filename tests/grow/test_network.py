"""Wrappers of the user's network, and networks that cannot grow."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

import esper
from esper.grow.grower import Grower
from esper.grow.network import base_digest, unwrap
from tests.grow.fixtures_growers import GROW, WAIT, make_grower, replay
from tests.grow.fixtures_networks import ResNet, images


class FullyShardedDataParallel(nn.Module):
    """Named like the wrapper of torch."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_network_with_sharded_parameters_is_refused() -> None:
    model = FullyShardedDataParallel(ResNet())
    with pytest.raises(ValueError, match="contains FullyShardedDataParallel; must be on one device or in Distributed"):
        Grower(model, SGD(model.parameters(), lr=0.1), example=images(), steps=5)
    with pytest.raises(ValueError, match=r"model=int: must be a torch.nn.Module"):
        Grower(3, SGD(model.parameters(), lr=0.1), example=images(), steps=5)  # type: ignore[arg-type]


def test_a_compiled_network_is_merged_without_its_wrapper() -> None:
    model = ResNet().eval()
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert unwrap(compiled) is model
    assert isinstance(esper.merge(compiled), ResNet)


def test_seeds_do_not_change_the_digest_of_a_network_and_other_shapes_do() -> None:
    model, *_, grower = make_grower(controller=replay(WAIT, GROW))
    before = base_digest(model)
    grower.step(val_loss=1.0)
    assert grower.summary()
    assert base_digest(model) == before
    assert base_digest(ResNet(16)) != before
