import math

import pytest
import torch

from esper.config import load_preset
from esper.growth import HOST_GROUP, GrowingHost, GrowthOptimizer, LRSchedule
from esper.growth.optimizer import FIRST_WARMUP, SHAPES
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


@pytest.mark.parametrize("shape", SHAPES)
def test_a_schedule_warms_up_then_decays_to_its_final_factor(shape: str) -> None:
    schedule = LRSchedule(shape=shape, warmup=0.1, final=0.2)
    curve = [schedule(step / 1000) for step in range(1001)]
    assert curve[0] == 0
    assert curve[100] == 1
    assert curve[-1] == pytest.approx(1.0 if shape == "constant" else 0.2)
    assert curve[:101] == sorted(curve[:101])
    assert curve[100:] == sorted(curve[100:], reverse=True)
    assert LRSchedule(shape=shape, warmup=0.0, final=0.0)(0.0) == 1


@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.8])
def test_wsd_stays_at_one_until_its_linear_decay_in_the_last_three_tenths(warmup: float) -> None:
    schedule, start = LRSchedule(shape="wsd", warmup=warmup, final=0.1), max(warmup, 0.7)
    assert [schedule(warmup), schedule((warmup + start) / 2), schedule(start)] == pytest.approx([1.0] * 3)
    assert schedule((start + 1) / 2) == pytest.approx(0.55)
    assert schedule(1.0) == pytest.approx(0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_schedule_stays_at_its_final_factor_after_the_end(shape: str) -> None:
    schedule = LRSchedule(shape=shape, warmup=0.1, final=0.0)
    assert schedule(1.3) == schedule(1.0)
    assert schedule.mass_left(1.3) == 0.0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("warmup", "final"), [(0.0, 0.0), (0.05, 0.1), (0.3, 0.5), (0.9, 0.0)])
def test_the_mass_left_is_the_share_of_the_integral_from_there_on(shape: str, warmup: float, final: float) -> None:
    schedule, parts = LRSchedule(shape=shape, warmup=warmup, final=final), 20_000
    middles = torch.tensor([schedule((index + 0.5) / parts) for index in range(parts)], dtype=torch.float64)
    numeric = middles.flip(0).cumsum(0).flip(0) / middles.sum()
    exact = torch.tensor([schedule.mass_left(index / parts) for index in range(parts + 1)], dtype=torch.float64)
    torch.testing.assert_close(exact[:-1], numeric, rtol=0, atol=1e-6)
    assert exact[0] == 1
    assert exact[-1] == 0
    assert (exact.diff() <= 0).all()


def seed_rates(trainer: GrowthOptimizer, growing: GrowingHost, progress: list[float], slot: str) -> list[float]:
    """The learning rate of a seed, relative to the host's, in steps at `progress`."""
    rates = []
    for share in progress:
        backward(growing, ON)
        trainer.step(share)
        rate = {group["owner"]: group["lr"] for group in trainer.torch.param_groups}
        rates.append(rate[slot] / rate[HOST_GROUP])
    return rates


def germinate(growing: GrowingHost, trainer: GrowthOptimizer, slot: str) -> None:
    growing.graft(slot, "conv_light", Blend.ADD, rng_seed=1)
    trainer.add(slot)


WARMED = [0.3, 0.31, 0.35, 0.4, 0.5]
RATES = [FIRST_WARMUP, 0.1, 0.5, 1.0, 1.0]  # with a warm-up of a tenth of the episode that starts at 0.3


def test_the_rate_of_a_new_seed_rises_linearly_from_its_first_step() -> None:
    growing = model("cnn", 8)
    trainer = optimizer(growing, seed_warmup=0.1)
    germinate(growing, trainer, "block1")
    assert seed_rates(trainer, growing, [0.0, 0.05], "block1") == [1.0, 1.0]  # it was there at the first step
    germinate(growing, trainer, "block2")
    assert seed_rates(trainer, growing, WARMED, "block2") == pytest.approx(RATES)
    assert seed_rates(trainer, growing, [0.5], "block1") == [1.0]


def test_the_warm_up_of_a_seed_starts_when_it_is_first_trained() -> None:
    growing = model("cnn", 8)
    trainer = optimizer(growing, seed_warmup=0.1)
    backward(growing, {})
    trainer.step(0.0)
    germinate(growing, trainer, "block1")
    backward(growing, {})  # grafted, not yet in the forward pass
    trainer.step(0.1)
    assert seed_rates(trainer, growing, WARMED, "block1") == pytest.approx(RATES)


def test_a_new_seed_in_a_used_slot_warms_up_anew() -> None:
    growing, trainer = two_seeds("sgd")
    trainer._seed_warmup = 0.1
    assert seed_rates(trainer, growing, [0.2], "block2") == [1.0]
    trainer.remove("block2")
    growing.remove("block2")
    germinate(growing, trainer, "block2")
    assert seed_rates(trainer, growing, WARMED, "block2") == pytest.approx(RATES)


def test_without_a_seed_warm_up_and_at_scale_one_all_rates_are_bit_equal_to_the_schedule() -> None:
    growing, trainer = two_seeds("sgd")
    trainer._schedule = LRSchedule(shape="cosine", warmup=0.05, final=0.1)
    germinate_at = {0.3: "block2"}
    for progress in (0.01, 0.123, 0.3, 0.301, 0.77):
        if slot := germinate_at.get(progress):
            trainer.remove(slot)
            growing.remove(slot)
            germinate(growing, trainer, slot)
        backward(growing, ON)
        trainer.step(progress)
        assert [group["lr"] for group in trainer.torch.param_groups] == [0.05 * trainer._schedule(progress)] * 4


def test_a_scale_multiplies_all_learning_rates() -> None:
    growing = model("cnn", 8)
    trainer = optimizer(growing, lr_scale=0.5)
    germinate(growing, trainer, "block1")
    backward(growing, ON)
    trainer.step(0.2)
    assert [group["lr"] for group in trainer.torch.param_groups] == pytest.approx([0.025] * 3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seed_warmup": 1.0}, r"^optimizer\.seed_warmup=1\.0: must be at least 0 and below 1\.$"),
        ({"seed_warmup": -0.1}, r"^optimizer\.seed_warmup=-0\.1: must be at least 0 and below 1\.$"),
        ({"lr_scale": 0.0}, r"^lr_scale=0\.0: must be above 0 and finite\.$"),
        ({"lr_scale": math.nan}, r"^lr_scale=nan: must be above 0 and finite\.$"),
    ],
)
def test_an_invalid_warm_up_or_scale_is_refused(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        optimizer(model("cnn", 8), **changes)


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
