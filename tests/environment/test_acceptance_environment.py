from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from esper.environment.host_run import gradient_health
from esper.growth import GrowthOptimizer
from tests.fixtures_environment import environment
from tests.growth.fixtures_hosts import backward, model, optimizer


@pytest.mark.parametrize(("clip", "health"), [(1.0, 1.0), (0.01, 0.2), (1e9, 0.5)])
def test_vanishing_and_exploding_are_judged_by_the_clip_norm(clip: float, health: float) -> None:
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(3)
    assert gradient_health(weights, clip).item() == pytest.approx(health)
    weights[0].grad = torch.tensor([0.0, torch.inf, 0.0])
    assert gradient_health(weights, clip) == 0


class Notes(torch.amp.GradScaler):
    """A scaler that writes down what is asked of it."""

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


def test_every_host_has_a_scaler_of_its_own_and_scales_back_before_it_clips() -> None:
    env = environment("environment.precision=fp16")
    env.reset([1, 2])
    mine, other = (run._scaler for run in env._runs)
    assert mine is not None
    assert other is not None
    assert mine is not other
    growing = model("cnn", 8)
    trainer, scaler = optimizer(growing), Notes()
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


def test_a_host_on_a_gpu_works_in_its_own_stream_behind_what_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown with streams that only write down what happens to them."""
    happened: list[str] = []

    class Stream:
        def wait_stream(self, other: str) -> None:
            happened.append(f"waits for {other}")

    @contextmanager
    def inside(stream: object) -> Any:
        happened.append("enters" if stream is mine else "enters another's")
        yield
        happened.append("leaves")

    mine = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the main one")
    monkeypatch.setattr(torch.cuda, "stream", inside)
    env = environment(envs=1)
    env.reset([1])
    run = env._runs[0]
    run._cuda_stream = mine  # type: ignore[assignment]
    run.measure({})
    assert happened == ["waits for the main one", "enters", "leaves"]


@pytest.mark.parametrize("batch", [16, 24])
def test_training_batches_have_the_size_that_is_asked_for(batch: int) -> None:
    env = environment(f"environment.batch={batch}", envs=1)
    env.reset([1])
    images, labels = env._runs[0]._stream.next()
    assert len(images) == len(labels) == batch
