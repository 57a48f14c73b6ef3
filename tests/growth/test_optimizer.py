import math

import pytest
import torch

from esper.config import load_preset
from esper.growth import HOST_GROUP, GrowingHost, GrowthOptimizer, LRSchedule
from esper.lifecycle import Blend
from tests.growth.fixtures_hosts import FULL, ISOLATED, backward, fill_with_nan, model, optimizer

ON = {"block1": FULL, "block2": ISOLATED}


def two_seeds(kind: str) -> tuple[GrowingHost, GrowthOptimizer]:
    growing = model("cnn", 8)
    trainer = optimizer(growing, kind)
    for number, slot in enumerate(("block1", "block2")):
        growing.graft(slot, "conv_light", Blend.ADD, rng_seed=number)
        trainer.add(slot)
    for index in range(3):
        backward(growing, ON, index)
        trainer.step(0.0)
    return growing, trainer


def state_of(trainer: GrowthOptimizer, owner: str) -> list[torch.Tensor]:
    return [value.clone() for p in trainer.parameters(owner) for value in trainer.torch.state[p].values()]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_pruning_one_seed_leaves_every_other_momentum_bit_equal(kind: str) -> None:
    growing, trainer = two_seeds(kind)
    before = {owner: state_of(trainer, owner) for owner in (HOST_GROUP, "block1")}
    assert all(before.values())
    removed = trainer.parameters("block2")
    trainer.remove("block2")
    growing.remove("block2")
    for owner, state in before.items():
        assert all(torch.equal(a, b) for a, b in zip(state, state_of(trainer, owner), strict=True))
    assert not any(parameter in trainer.torch.state for parameter in removed)
    assert trainer.owners == (HOST_GROUP, "block1")
    backward(growing, ON)
    trainer.step(0.0)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_germinating_a_seed_leaves_every_other_momentum_bit_equal(kind: str) -> None:
    growing, trainer = two_seeds(kind)
    trainer.remove("block2")
    growing.remove("block2")
    before = {owner: state_of(trainer, owner) for owner in (HOST_GROUP, "block1")}
    growing.graft("block2", "attention", Blend.MULTIPLY, rng_seed=9)
    trainer.add("block2")
    for owner, state in before.items():
        assert all(torch.equal(a, b) for a, b in zip(state, state_of(trainer, owner), strict=True))
    assert state_of(trainer, "block2") == []


def test_a_seed_has_one_group_and_present_seeds_are_included() -> None:
    growing, _ = two_seeds("sgd")
    groups = [group["owner"] for group in optimizer(growing).torch.param_groups]
    assert groups == [HOST_GROUP, HOST_GROUP, "block1", "block2"]


def test_weight_decay_excludes_norms_biases_and_seeds() -> None:
    _, trainer = two_seeds("sgd")
    decay = [(group["owner"], group["weight_decay"]) for group in trainer.torch.param_groups]
    assert decay == [(HOST_GROUP, 5e-4), (HOST_GROUP, 0.0), ("block1", 0.0), ("block2", 0.0)]
    assert all(p.ndim == 1 for p in trainer.torch.param_groups[1]["params"])
    assert all(p.ndim > 1 for p in trainer.torch.param_groups[0]["params"])


def test_host_and_each_seed_are_clipped_separately() -> None:
    growing, trainer = two_seeds("sgd")
    backward(growing, ON)
    expected = {owner: [p.grad.clone() for p in trainer.parameters(owner)] for owner in trainer.owners}
    for parameter in trainer.parameters("block1"):
        parameter.grad *= 1e4
    clipped = {}
    trainer.torch.step = lambda: clipped.update(
        {o: [p.grad.clone() for p in trainer.parameters(o)] for o in trainer.owners}
    )
    norms = trainer.step(0.0)
    assert norms["block1"] > 100
    assert torch.stack([g.norm() for g in clipped["block1"]]).norm().item() == pytest.approx(1, abs=1e-3)
    for owner in (HOST_GROUP, "block2"):
        before = torch.stack([g.norm() for g in expected[owner]]).norm()
        assert norms[owner].item() == pytest.approx(before.item(), rel=1e-5)
        scale = min(1.0, 1 / before.item())
        for one, other in zip(expected[owner], clipped[owner], strict=True):
            torch.testing.assert_close(one * scale, other, rtol=1e-4, atol=1e-7)


def test_a_non_finite_seed_affects_only_itself() -> None:
    growing, trainer = two_seeds("sgd")
    fill_with_nan(growing.seed("block2"))
    backward(growing, ON)
    norms = trainer.step(0.0)
    assert not norms["block2"].isfinite()
    assert norms[HOST_GROUP].isfinite()
    assert all(p.isfinite().all() for owner in (HOST_GROUP, "block1") for p in trainer.parameters(owner))


def test_the_schedule_scales_the_learning_rates_of_host_and_seeds() -> None:
    growing, trainer = two_seeds("sgd")
    trainer._schedule = LRSchedule(shape="linear", warmup=0.0, final=0.0)
    for progress, expected in ((0.0, 0.05), (0.5, 0.025), (1.0, 0.0), (0.0, 0.05)):
        backward(growing, ON)
        trainer.step(progress)
        assert [group["lr"] for group in trainer.torch.param_groups] == pytest.approx([expected] * 4)


def test_a_seed_without_gradients_does_not_change() -> None:
    growing, trainer = two_seeds("sgd")
    before = [p.clone() for p in trainer.parameters("block2")]
    backward(growing, {"block1": FULL})
    assert trainer.step(0.0)["block2"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters("block2"), strict=True))


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_a_schedule_warms_up_then_decays_to_its_final_factor(shape: str) -> None:
    schedule = LRSchedule(shape=shape, warmup=0.1, final=0.2)
    curve = [schedule(step / 1000) for step in range(1001)]
    assert curve[0] == 0
    assert curve[100] == 1
    assert curve[-1] == pytest.approx(1.0 if shape == "constant" else 0.2)
    assert curve[:101] == sorted(curve[:101])
    assert curve[100:] == sorted(curve[100:], reverse=True)
    assert LRSchedule(shape=shape, warmup=0.0, final=0.0)(0.0) == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"warmup": 1.5}, r"schedule\.warmup=1\.5: must be at least 0 and below 1"),
        ({"final": -1.0}, r"schedule\.final=-1\.0: must be at least 0 and below 1"),
    ],
)
def test_an_invalid_schedule_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LRSchedule(**{"shape": "cosine", "warmup": 0.1, "final": 0.1, **changes})


@pytest.mark.parametrize(("preset", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_the_presets_build_torchs_optimizers(preset: str, kind: type[torch.optim.Optimizer]) -> None:
    growing = model("cnn", 8)
    trainer = load_preset(f"optimizer/{preset}", model=growing)
    assert isinstance(trainer.torch, kind)
    backward(growing, {})
    assert math.isfinite(trainer.step(0.5)[HOST_GROUP].item())
