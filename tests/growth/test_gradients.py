import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from esper.growth.gradients import FlatGradients
from tests.growth.fixtures_hosts import backward, model, optimizer
from tests.growth.test_optimizer import ON, two_seeds


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
    assert torch.equal(*buffer.of("seed"), torch.ones(12))
    assert not buffer.of("host")[0].any()
    assert buffer.is_complete
    modules["idle"](torch.ones(1, 2)).sum().backward()
    assert not buffer.is_complete, "it has no place for a gradient that came later"


def test_parameters_of_several_dtypes_are_clipped_together() -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, dtype=torch.float64))]
    for parameter, value in zip(parameters, (4.0, 3.0), strict=True):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad[0] = value
    assert FlatGradients({"host": parameters}).clip(1.0)["host"] == 5
    assert [parameter.grad[0].item() for parameter in parameters] == pytest.approx([0.8, 0.6])  # type: ignore[index]


def test_a_kept_buffer_changes_no_bit_of_the_training() -> None:
    trained = []
    for keep in (False, True):
        growing, trainer = two_seeds("sgd")
        for _ in range(3):
            backward(growing, ON)
            trainer.step(0.3, keep_buffer=keep)
        trained.append([parameter.detach() for parameter in growing.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))


def test_a_first_step_that_a_scaler_skips_leaves_no_momentum() -> None:
    growing = model("cnn", 8)
    trainer, scaler = optimizer(growing), torch.amp.GradScaler("cpu")
    for scale in (torch.inf, 1.0):
        backward(growing, {})
        for parameter in growing.parameters():
            if parameter.grad is not None:
                parameter.grad *= scale * scaler.scale(torch.ones(()))
        before = [parameter.detach().clone() for parameter in growing.parameters()]
        trainer.step(0.3, scaler)
        if scale == torch.inf:
            assert all(torch.equal(one, other) for one, other in zip(before, growing.parameters(), strict=True))
            assert all(not state["momentum_buffer"].any() for state in trainer.torch.state.values())
    assert any(state["momentum_buffer"].any() for state in trainer.torch.state.values())
