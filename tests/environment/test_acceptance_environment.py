from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from esper.growth import GrowthOptimizer, gradient_health
from tests.fixtures_environment import environment
from tests.growth.fixtures_hosts import backward, model, optimizer


@pytest.mark.parametrize(("clip", "health"), [(1.0, 1.0), (0.01, 0.2), (1e9, 0.5)])
def test_vanishing_and_exploding_gradients_are_relative_to_the_clip_norm(clip: float, health: float) -> None:
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(3)
    assert gradient_health(weights, clip).item() == pytest.approx(health)
    weights[0].grad = torch.tensor([0.0, torch.inf, 0.0])
    assert gradient_health(weights, clip) == 0


class RecordingScaler(torch.amp.GradScaler):
    """A GradScaler that records its calls."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.calls: list[str] = []

    def unscale_(self, optimizer: Any) -> None:
        self.calls.append("unscale")
        super().unscale_(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("step")
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        self.calls.append("update")
        super().update(new_scale)


def test_every_host_has_its_own_grad_scaler_and_unscales_before_clipping() -> None:
    env = environment("environment.precision=fp16")
    env.reset([1, 2])
    mine, other = (env.host_run(index)._scaler for index in range(2))
    assert mine is not None
    assert other is not None
    assert mine is not other
    growing = model("cnn", 8)
    trainer, scaler = optimizer(growing), RecordingScaler()
    backward(growing, {})
    unscaled = [parameter.grad.clone() for parameter in growing.parameters() if parameter.grad is not None]
    for parameter in growing.parameters():
        if parameter.grad is not None:
            parameter.grad *= scaler.scale(torch.ones(()))
    norms = trainer.step(0.0, scaler, lambda: scaler.calls.append("watch"))
    assert scaler.calls == ["unscale", "watch", "step", "update"]
    expected = torch.stack([gradient.norm() for gradient in unscaled]).norm()
    assert norms["host"].item() == pytest.approx(expected.item(), rel=1e-4)
    assert "unscale, watch, clip, step, update" in (GrowthOptimizer.step.__doc__ or "")


def test_a_host_on_a_gpu_uses_its_own_stream_after_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake streams that record their calls."""
    calls: list[str] = []

    class FakeStream:
        def wait_stream(self, other: str) -> None:
            calls.append(f"wait for {other}")

    @contextmanager
    def enter_stream(stream: object) -> Any:
        calls.append("enter" if stream is own_stream else "enter another stream")
        yield
        calls.append("exit")

    own_stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    monkeypatch.setattr(torch.cuda, "stream", enter_stream)
    env = environment(envs=1)
    env.reset([1])
    run = env.host_run(0)
    run._cuda_stream = own_stream  # type: ignore[assignment]
    run.measure({}, None)
    assert calls == ["wait for the current stream", "enter", "exit"]


@pytest.mark.parametrize("batch", [16, 24])
def test_training_batches_have_the_requested_size(batch: int) -> None:
    env = environment(f"environment.batch={batch}", envs=1)
    env.reset([1])
    images, labels = env.host_run(0)._stream.next()
    assert len(images) == len(labels) == batch
