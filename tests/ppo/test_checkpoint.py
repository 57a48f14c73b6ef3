import os
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.ppo import AtomicCheckpointIO, CheckpointCallback, Collector, restore_module
from esper.ppo.checkpoint import BEST, LAST, read_checkpoint
from tests.ppo.fixtures_environments import Locks, learner, trainer


def run(directory: Path, rounds: int = 2, **changes: Any) -> Any:
    world = Locks()
    module = learner(world, **changes)
    callback = CheckpointCallback(directory, every=1, best="episode/score")
    fitting = trainer(rounds, callbacks=[callback], plugins=[AtomicCheckpointIO()])
    fitting.fit(module, datamodule=Collector(world, run_seed=0, warmup=2))
    return module


def plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(plain(key) and plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(plain, value))
    return value is None or type(value) in (int, float, bool, str, torch.Tensor)


def test_a_checkpoint_is_plain_data_and_says_what_it_is(tmp_path: Path) -> None:
    module = run(tmp_path)
    found = torch.load(tmp_path / LAST, weights_only=True)
    assert plain({key: value for key, value in found.items() if key != "state_dict"})
    about = found["esper"]
    assert about["version"] == 2
    assert about["layout"] == module.policy.layout.to_dict()
    assert about["sizes"]["hidden"] == 16
    assert about["counters"]["rounds"] == 2
    assert {"policy.base_statistics.mean", "scale.statistics.variance"} <= set(found["state_dict"])
    assert about["generator"].dtype == torch.uint8


def test_a_restored_module_is_where_the_saved_one_was(tmp_path: Path) -> None:
    module = run(tmp_path)
    fresh = learner(Locks(), seed=9)
    torch.manual_seed(1)
    restore_module(fresh, tmp_path / LAST)
    for name, value in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert fresh.counters == module.counters
    optimizer = fresh.configure_optimizers()
    assert len(optimizer.state) == len(list(fresh.policy.parameters()))


def test_the_best_is_kept_beside_the_last(tmp_path: Path) -> None:
    run(tmp_path, rounds=4)
    best, last = read_checkpoint(tmp_path / BEST), read_checkpoint(tmp_path / LAST)
    assert last.metadata.counters.rounds == 4
    assert best.metadata.counters.rounds <= 4
    state = next(iter(last.callbacks.values()))
    assert isinstance(state["highest"], float)


def test_a_kill_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, rounds=1)

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"esper": {"version": 1}}, tmp_path / LAST)
    assert read_checkpoint(tmp_path / LAST).metadata.counters.rounds == 1


def test_what_is_no_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "none.ckpt")
    (tmp_path / "noise.ckpt").write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match="no checkpoint that can be read"):
        read_checkpoint(tmp_path / "noise.ckpt")
    run(tmp_path, rounds=1)
    whole = (tmp_path / LAST).read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut off"):
        read_checkpoint(tmp_path / "cut.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match="not of esper"):
        read_checkpoint(tmp_path / "foreign.ckpt")
    torch.save({"esper": {"version": 99}}, tmp_path / "newer.ckpt")
    with pytest.raises(ValueError, match="version 99; this esper reads 1 to 2"):
        read_checkpoint(tmp_path / "newer.ckpt")


def test_code_in_a_checkpoint_is_never_executed(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"esper": {"version": 1}, "trap": Trap()}, tmp_path / "trap.ckpt")
    with pytest.raises(ValueError, match="no checkpoint that can be read"):
        read_checkpoint(tmp_path / "trap.ckpt")
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(("key", "value"), [("hidden", 32), ("layers", 2), ("head_hidden", 40)])
def test_another_size_is_refused_by_its_key(tmp_path: Path, key: str, value: int) -> None:
    run(tmp_path, rounds=1)
    other = learner(Locks(), net={key: value})
    with pytest.raises(ValueError, match=rf"policy.{key}={value}: the checkpoint .* has"):
        restore_module(other, tmp_path / LAST)


def test_another_layout_is_refused_by_what_differs(tmp_path: Path) -> None:
    run(tmp_path, rounds=1)
    other = learner(Locks(actions="full"))
    with pytest.raises(ValueError, match="options: this run has"):
        restore_module(other, tmp_path / LAST)


def test_slots_in_another_order_are_refused(tmp_path: Path) -> None:
    run(tmp_path, rounds=1)
    world = Locks()
    world.layout = type(world.layout)(**{**vars(world.layout), "slots": world.layout.slots[::-1]})
    with pytest.raises(ValueError, match="slots: this run has"):
        restore_module(learner(world), tmp_path / LAST)


def test_the_best_of_another_metric_does_not_count(tmp_path: Path) -> None:
    by_score, by_return = (
        CheckpointCallback(tmp_path, every=1, best=name) for name in ("episode/score", "episode/return")
    )
    by_score._highest = 50.0
    by_return.load_state_dict(by_score.state_dict())
    assert by_return._highest is None


def test_a_restored_optimizer_decays_as_this_run_says(tmp_path: Path) -> None:
    run(tmp_path, rounds=1)
    module = learner(Locks(), weight_decay=0.5)
    restore_module(module, tmp_path / LAST)
    groups = {group["name"]: group["weight_decay"] for group in module.configure_optimizers().param_groups}
    assert groups["critic"] == 0.5


def test_saving_less_often_than_every_round_is_a_whole_number() -> None:
    with pytest.raises(ValueError, match=r"callbacks.checkpoints.every=0"):
        CheckpointCallback("x", every=0, best=None)
