import math

import pytest
import torch

from esper.growth import HOST_GROUP, GrowingHost, GrowthOptimizer, adopt, restore, snapshot
from esper.lifecycle import Blend
from tests.growth.fixtures_hosts import FULL, ISOLATED, all_equal, backward, fill_with_nan, model, optimizer

ON = {"block1": FULL, "block2": ISOLATED}


def grown(kind: str) -> tuple[GrowingHost, GrowthOptimizer]:
    growing = model("cnn", 8)
    trainer = optimizer(growing, kind)
    for slot, blueprint, blend in (("block1", "conv_light", Blend.GATED), ("block2", "depthwise", Blend.ADD)):
        growing.graft(slot, blueprint, blend, rng_seed=3)
        trainer.add(slot)
    train(growing, trainer, 3)
    return growing, trainer


def train(growing: GrowingHost, trainer: GrowthOptimizer, steps: int) -> None:
    for index in range(steps):
        backward(growing, ON, index)
        trainer.step(0.0)


def contents(growing: GrowingHost, trainer: GrowthOptimizer) -> dict[str, torch.Tensor]:
    result = {name: value.clone() for name, value in growing.state_dict().items()}
    for name, parameter in growing.named_parameters():
        for key, value in trainer.torch.state.get(parameter, {}).items():
            result[f"{name}/{key}"] = value.clone()
    return result


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_restored_model_is_bit_equal_and_so_is_its_further_training(kind: str) -> None:
    growing, trainer = grown(kind)
    saved, before = snapshot(growing, trainer), contents(growing, trainer)
    train(growing, trainer, 2)
    after = contents(growing, trainer)
    assert not all_equal(before, after)
    restore(saved, growing, trainer)
    assert all_equal(before, contents(growing, trainer))
    train(growing, trainer, 2)
    assert all_equal(after, contents(growing, trainer))
    restore(saved, growing, trainer)  # the snapshot has not changed
    assert all_equal(before, contents(growing, trainer))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_snapshot_shares_no_memory_with_the_model(kind: str) -> None:
    growing, trainer = grown(kind)
    saved = snapshot(growing, trainer)
    restore(saved, growing, trainer)
    stored = [*saved.weights.values(), *(v for state in saved.optimizer.values() for v in state.values())]
    live = [*growing.state_dict().values(), *(v for state in trainer.torch.state.values() for v in state.values())]
    assert not {t.untyped_storage().data_ptr() for t in stored} & {t.untyped_storage().data_ptr() for t in live}


def test_restoring_adds_removed_seeds_and_removes_new_ones() -> None:
    growing, trainer = grown("sgd")
    saved, before = snapshot(growing, trainer), contents(growing, trainer)
    for slot in ("block1", "block2"):
        trainer.remove(slot)
        growing.remove(slot)
    growing.graft("block2", "norm", Blend.MULTIPLY, rng_seed=4)
    trainer.add("block2")
    restore(saved, growing, trainer)
    assert all_equal(before, contents(growing, trainer))
    assert set(trainer.owners) == {HOST_GROUP, "block1", "block2"}


def test_a_restored_seed_continues_its_warm_up_and_not_that_of_a_later_seed_in_its_slot() -> None:
    growing = model("cnn", 8)
    trainer = optimizer(growing, seed_warmup=0.2)
    for slot, progress in (("block1", 0.0), ("block2", 0.3)):
        growing.graft(slot, "conv_light", Blend.ADD, rng_seed=3)
        trainer.add(slot)
        backward(growing, ON)
        trainer.step(progress)
    saved = snapshot(growing, trainer)
    trainer.remove("block2")
    growing.remove("block2")
    growing.graft("block2", "conv_light", Blend.ADD, rng_seed=4)  # same blueprint and blend, so it is not replaced
    trainer.add("block2")
    backward(growing, ON)
    trainer.step(0.35)
    assert trainer.seed_starts == {"block1": -math.inf, "block2": 0.35}
    later = adopt(saved, snapshot(growing, trainer), ["block2"])
    restore(saved, growing, trainer)
    backward(growing, ON)
    trainer.step(0.4)
    rates = {group["owner"]: group["lr"] for group in trainer.torch.param_groups}
    assert rates == pytest.approx({HOST_GROUP: 0.05, "block1": 0.05, "block2": 0.025})
    restore(later, growing, trainer)
    assert trainer.seed_starts == {"block1": -math.inf, "block2": 0.35}


def test_a_snapshot_of_some_slots_restores_only_their_seeds() -> None:
    growing, trainer = grown("sgd")
    saved = snapshot(growing, trainer, slots=["block1"])
    before = {name: value for name, value in contents(growing, trainer).items() if "block2" not in name}
    fill_with_nan(growing)
    restore(saved, growing, trainer)
    assert list(growing.seeds) == ["block1"]
    assert trainer.owners == (HOST_GROUP, "block1")
    assert all_equal(before, contents(growing, trainer))


def test_a_snapshot_is_plain_data(tmp_path: object) -> None:
    growing, trainer = grown("adamw")
    saved = snapshot(growing, trainer)
    path = f"{tmp_path}/snapshot.pt"
    torch.save({"seeds": saved.seeds, "weights": saved.weights, "optimizer": saved.optimizer}, path)
    loaded = torch.load(path, weights_only=True)
    assert loaded["seeds"] == saved.seeds == {"block1": ("conv_light", 2), "block2": ("depthwise", 0)}
    assert all_equal(loaded["weights"], saved.weights)
