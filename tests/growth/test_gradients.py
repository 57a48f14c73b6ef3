import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from esper.growth.gradients import FlatGradients
from tests.growth.test_optimizer import ON, backward, two_seeds


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return {"host": convolution, "seed": nn.Linear(5, 2), "idle": nn.Linear(2, 2)}


def fill_gradients(modules: dict[str, nn.Module]) -> None:
    modules["host"](torch.randn(2, 3, 8, 8)).square().sum().backward()
    modules["seed"](torch.randn(4, 5)).sum().backward()


@pytest.mark.parametrize("largest", [0.5, 1e9])
def test_each_owner_is_clipped_as_torch_clips_it(largest: float) -> None:
    modules, expected = networks(), networks()
    for each in (modules, expected):
        torch.manual_seed(1)
        fill_gradients(each)
    norms = FlatGradients({owner: list(module.parameters()) for owner, module in modules.items()}).clip(largest)
    for owner in ("host", "seed"):
        norm = clip_grad_norm_(expected[owner].parameters(), largest)
        torch.testing.assert_close(norms[owner], norm)
        for ours, torchs in zip(modules[owner].parameters(), expected[owner].parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad, torchs.grad)
            assert ours.grad.stride() == ours.stride(), "the memory format is that of the parameter"
    assert norms["idle"] == 0
    assert all(parameter.grad is None for parameter in modules["idle"].parameters())


def test_later_gradients_are_added_to_the_buffer() -> None:
    modules = networks()
    fill_gradients(modules)
    buffer = FlatGradients({owner: list(module.parameters()) for owner, module in modules.items()})
    buffer.zero()
    modules["seed"](torch.ones(1, 5)).sum().backward()
    assert torch.equal(buffer.of("seed"), torch.ones(12))
    assert not buffer.of("host").any()


def test_a_kept_buffer_changes_no_bit_of_the_training() -> None:
    trained = []
    for keep in (False, True):
        growing, trainer = two_seeds("sgd")
        for _ in range(3):
            backward(growing, ON)
            trainer.step(0.3, keep_buffer=keep)
        trained.append([parameter.detach() for parameter in growing.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))
