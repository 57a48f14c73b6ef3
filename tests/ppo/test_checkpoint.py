import os
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.ppo import AtomicCheckpointIO, CheckpointCallback
from esper.ppo.checkpoint import BEST, LAST, read_checkpoint
from tests.ppo.fixtures_environments import MatchingEnv, make_collector, make_module, make_trainer, restore


def train_and_save(directory: Path, rounds: int = 2, **changes: Any) -> Any:
    env = MatchingEnv()
    module = make_module(env, **changes)
    callback = CheckpointCallback(directory, every=1, best="episode/score")
    trainer = make_trainer(rounds, callbacks=[callback], plugins=[AtomicCheckpointIO()])
    trainer.fit(module, datamodule=make_collector(module, env, warmup=2))
    return module


def is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (int, float, bool, str, torch.Tensor)


def test_a_checkpoint_is_plain_data_with_metadata(tmp_path: Path) -> None:
    module = train_and_save(tmp_path)
    content = torch.load(tmp_path / LAST, weights_only=True)
    assert is_plain({key: value for key, value in content.items() if key != "state_dict"})
    metadata = content["esper"]
    assert metadata["version"] == 3
    assert metadata["layout"] == module.policy.layout.to_dict()
    assert metadata["sizes"]["hidden"] == 16
    assert metadata["counters"]["rounds"] == 2
    assert {"policy.base_statistics.mean", "scale.statistics.variance"} <= set(content["state_dict"])
    assert metadata["generator"].dtype == torch.uint8


def test_a_restored_module_equals_the_saved_one(tmp_path: Path) -> None:
    module = train_and_save(tmp_path)
    fresh = make_module(MatchingEnv(), run_seed=9)
    torch.manual_seed(1)
    restore(fresh, tmp_path / LAST)
    for name, value in module.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    assert fresh.counters == module.counters
    optimizer = fresh.optimizers()
    assert not isinstance(optimizer, list)
    assert len(optimizer.state) == len(list(fresh.policy.parameters()))
    saved = torch.load(tmp_path / LAST, weights_only=True)["esper"]["generator"]
    assert torch.equal(torch.get_rng_state(), saved)


def test_the_best_and_the_last_are_saved(tmp_path: Path) -> None:
    train_and_save(tmp_path, rounds=4)
    best, last = read_checkpoint(tmp_path / BEST), read_checkpoint(tmp_path / LAST)
    assert last.metadata.counters.rounds == 4
    assert best.metadata.counters.rounds <= 4
    state = torch.load(tmp_path / LAST, weights_only=True)["callbacks"]["CheckpointCallback"]
    assert isinstance(state["highest"], float)


def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_and_save(tmp_path, rounds=1)

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        AtomicCheckpointIO().save_checkpoint({"esper": {"version": 1}}, tmp_path / LAST)
    assert read_checkpoint(tmp_path / LAST).metadata.counters.rounds == 1


def test_a_file_that_is_not_a_checkpoint_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the checkpoint does not exist"):
        read_checkpoint(tmp_path / "none.ckpt")
    (tmp_path / "noise.ckpt").write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match="is not a readable checkpoint"):
        read_checkpoint(tmp_path / "noise.ckpt")
    train_and_save(tmp_path, rounds=1)
    whole = (tmp_path / LAST).read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="it is truncated"):
        read_checkpoint(tmp_path / "cut.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(ValueError, match="not of esper"):
        read_checkpoint(tmp_path / "foreign.ckpt")
    torch.save({"esper": {"version": 99}}, tmp_path / "newer.ckpt")
    with pytest.raises(ValueError, match="version 99; this esper reads version 3"):
        read_checkpoint(tmp_path / "newer.ckpt")


def test_code_in_a_checkpoint_is_never_executed(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"esper": {"version": 1}, "payload": Payload()}, tmp_path / "payload.ckpt")
    with pytest.raises(ValueError, match="is not a readable checkpoint"):
        read_checkpoint(tmp_path / "payload.ckpt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(("key", "value"), [("hidden", 32), ("layers", 2), ("head_hidden", 40)])
def test_another_size_is_refused_with_its_key(tmp_path: Path, key: str, value: int) -> None:
    train_and_save(tmp_path, rounds=1)
    other = make_module(MatchingEnv(), network={key: value})
    with pytest.raises(ValueError, match=rf"policy.{key}={value}: the checkpoint .* has"):
        restore(other, tmp_path / LAST)


def test_another_layout_is_refused_with_what_differs(tmp_path: Path) -> None:
    train_and_save(tmp_path, rounds=1)
    env = MatchingEnv(actions="full")
    with pytest.raises(ValueError, match="options: this run has"):
        restore(make_module(env), tmp_path / LAST, env)


def test_slots_in_another_order_are_refused(tmp_path: Path) -> None:
    train_and_save(tmp_path, rounds=1)
    env = MatchingEnv()
    env.layout = type(env.layout)(**{**vars(env.layout), "slots": env.layout.slots[::-1]})
    with pytest.raises(ValueError, match="slots: this run has"):
        restore(make_module(env), tmp_path / LAST, env)


def test_the_best_value_of_another_metric_is_not_restored(tmp_path: Path) -> None:
    by_score, by_return = (
        CheckpointCallback(tmp_path, every=1, best=name) for name in ("episode/score", "episode/return")
    )
    by_score.load_state_dict({"metric": "episode/score", "highest": 50.0})
    by_return.load_state_dict(by_score.state_dict())
    assert by_score.best_model_score == 50
    assert by_return.best_model_score is None


def test_a_restored_optimizer_has_the_weight_decay_of_this_run(tmp_path: Path) -> None:
    train_and_save(tmp_path, rounds=1)
    module = make_module(MatchingEnv(), weight_decay=0.5)
    restore(module, tmp_path / LAST)
    optimizer = module.optimizers()
    assert not isinstance(optimizer, list)
    groups = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert groups["critic"] == 0.5


def test_an_interval_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match=r"callbacks.checkpoints.every=0"):
        CheckpointCallback("x", every=0, best=None)
