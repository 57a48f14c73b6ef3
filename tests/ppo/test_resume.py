"""Resumed runs: whatever ended them, they continue as if nothing had happened."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from esper.ppo import LAST, PPO, AtomicCheckpointIO, CheckpointCallback, Rollout, StoppedError, read_checkpoint
from tests.ppo.fixtures_environments import MatchingEnv, make_collector, make_module, make_trainer

ROUNDS = 4
TINY_NETWORK = {"hidden": 4, "head_hidden": 4}
Event = tuple[str, int, int]  # kind of round, rounds done, step; step -1 is the end of an update


class KilledError(BaseException):
    """Ends a run without a chance to save, as SIGKILL does."""


class EventRecorder(Callback):
    """A RoundListener and callback: records the rounds that are run, and calls `at[event]` at that event.

    It also draws from torch's global generator in every step, as a module of a user might.
    """

    def __init__(self, module: PPO, at: dict[Event, Callable[[], None]]) -> None:
        self._module, self._at, self._step = module, at, 0
        self.rounds: list[tuple[str, int, list[int], list[float]]] = []

    def on_round_start(self, kind: str, episode_seeds: Sequence[int], steps: int) -> None:
        self.rounds.append((kind, self._module.counters.rounds, list(episode_seeds), []))
        self._step = 0

    def on_step(self, action: torch.Tensor, step: object) -> None:
        kind, done, _, drawn = self.rounds[-1]
        drawn.append(torch.rand(()).item())
        self._step += 1
        self._at.get((kind, done, self._step), int)()

    def on_round_end(self, rollout: Rollout) -> None: ...

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._at.get(("update", self._module.counters.rounds, -1), int)()


def run(
    directory: Path,
    at: dict[Event, str] | None = None,
    rounds: int = ROUNDS,
    every: int = 1,
    best: str | None = "episode/score",
    **changes: Any,
) -> tuple[PPO, EventRecorder]:
    """Run up to `rounds` rounds, from the checkpoint if there is one; validate after every second round.

    `at` ends the run at an event: by `kill`, or by `stop`, a signal that is answered before the next step.
    """
    env, last = MatchingEnv(), directory / LAST
    module = make_module(env, **{"epochs": 2, **changes})

    def stop() -> None:
        collector.stop_reason = "SIGTERM"

    def kill() -> None:
        raise KilledError

    ends = {"kill": kill, "stop": stop}
    recorder = EventRecorder(module, {event: ends[end] for event, end in (at or {}).items()})
    callbacks = [recorder, CheckpointCallback(directory, every=every, best=best)]
    collector = make_collector(module, env, warmup=2, listeners=[recorder])
    trainer = make_trainer(
        rounds, callbacks=callbacks, plugins=[AtomicCheckpointIO()], limit_val_batches=1.0, check_val_every_n_epoch=2
    )
    torch.manual_seed(5)  # of the process; a resumed run must not depend on it
    trainer.fit(module, datamodule=collector, ckpt_path=last if last.exists() else None, weights_only=True)
    return module, recorder


def content(directory: Path) -> dict[str, Any]:
    """Everything of the last checkpoint that decides how a run continues, flat."""
    loaded = torch.load(directory / LAST, weights_only=True)
    saved = {key: loaded[key] for key in ("state_dict", "optimizer_states", "esper", "callbacks", "epoch")}
    flat: dict[str, Any] = {}

    def flatten(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                flatten(f"{name}/{key}", item)
        elif isinstance(value, list):
            flatten(name, dict(enumerate(value)))
        else:
            flat[name] = value

    flatten("", saved)
    return flat


def assert_same_content(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        is_equal = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert is_equal, name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EventRecorder]:
    """A run without interruption."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, run(directory)[1]


@pytest.mark.parametrize(
    ("event", "end", "saved"),
    [
        (("training", 1, 3), "kill", 1),
        (("training", 2, 1), "kill", 2),
        (("update", 3, -1), "kill", 2),
        (("sampled", 2, 2), "kill", 1),
        (("greedy", 4, 4), "kill", 3),
        (("training", 0, 2), "stop", 0),
        (("training", 1, 2), "stop", 1),
        (("training", 2, 4), "stop", 2),
        (("training", 3, 1), "stop", 3),
        (("greedy", 2, 1), "stop", 2),
    ],
)
def test_a_run_that_was_killed_or_stopped_anywhere_continues_bit_exactly(
    whole: tuple[Path, EventRecorder], tmp_path: Path, event: Event, end: str, saved: int
) -> None:
    """No round is skipped or run twice after the checkpoint, and validation runs after the same rounds."""
    directory, uninterrupted = whole
    with pytest.raises((KilledError, StoppedError)):
        run(tmp_path, {event: end})
    assert torch.load(tmp_path / LAST, weights_only=True)["esper"]["counters"]["rounds"] == saved
    _, resumed = run(tmp_path)
    later = [each for each in uninterrupted.rounds if each[1] > saved or (each[:2] == ("training", saved))]
    assert resumed.rounds == later
    assert_same_content(content(tmp_path), content(directory))


def test_a_run_that_was_killed_while_it_wrote_a_checkpoint_continues_bit_exactly(
    whole: tuple[Path, EventRecorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3, 4):  # a new best is written before the last, so these are of both files
        calls = 0

        def interrupt(descriptor: int, number: int = number) -> None:
            nonlocal calls
            calls += 1
            if calls == number:
                raise KilledError

        directory = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupt)
            with pytest.raises(KilledError):
                run(directory)
        run(directory)
        assert_same_content(content(directory), content(whole[0]))


def test_a_run_that_was_stopped_twice_continues_bit_exactly(whole: tuple[Path, EventRecorder], tmp_path: Path) -> None:
    for event in (("training", 1, 2), ("training", 1, 4)):
        with pytest.raises(StoppedError):
            run(tmp_path, {event: "stop"})
    run(tmp_path)
    assert_same_content(content(tmp_path), content(whole[0]))


def test_a_finished_run_continues_with_more_rounds(whole: tuple[Path, EventRecorder], tmp_path: Path) -> None:
    run(tmp_path, rounds=2)
    module, again = run(tmp_path, rounds=2)
    assert again.rounds == []
    assert module.counters.rounds == 2, "restored, though there is nothing to run"
    run(tmp_path)
    assert_same_content(content(tmp_path), content(whole[0]))


def test_the_last_checkpoint_is_saved_every_few_rounds_and_when_the_run_ends_or_stops(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        run(tmp_path / "killed", {("training", 3, 1): "kill"}, every=2)
    assert content(tmp_path / "killed")["/esper/counters/rounds"] == 2
    with pytest.raises(StoppedError):
        run(tmp_path / "stopped", {("training", 3, 1): "stop"}, every=100)
    assert content(tmp_path / "stopped")["/esper/counters/rounds"] == 3
    run(tmp_path / "whole", every=100)
    assert content(tmp_path / "whole")["/esper/counters/rounds"] == ROUNDS


def test_a_round_without_an_optimizer_step_is_saved_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPO, "_compute_gradients", lambda *args: ({"policy/kl": float("nan")}, 1.0))
    with pytest.raises(KilledError):
        run(tmp_path, {("training", 2, 1): "kill"}, target_kl=None)
    assert content(tmp_path)["/esper/counters/rounds"] == 2
    assert content(tmp_path)["/esper/counters/updates"] == 0
    best = torch.load(tmp_path / "best.ckpt", weights_only=True)["esper"]["counters"]
    assert best["rounds"] in (1, 2)
    assert best["updates"] == 0


def test_the_best_checkpoint_survives_a_run_directory_that_was_moved(tmp_path: Path) -> None:
    run(tmp_path / "old", rounds=2)
    shutil.move(tmp_path / "old", tmp_path / "new")
    kept = torch.load(tmp_path / "new/best.ckpt", weights_only=True)
    kept["callbacks"]["CheckpointCallback"]["highest"] = 1e6  # no later round is better
    torch.save({**torch.load(tmp_path / "new" / LAST, weights_only=True), "callbacks": kept["callbacks"]},
               tmp_path / "new" / LAST)  # fmt: skip
    before = (tmp_path / "new/best.ckpt").read_bytes()
    run(tmp_path / "new", every=3)
    assert (tmp_path / "new/best.ckpt").read_bytes() == before
    assert content(tmp_path / "new")["/callbacks/CheckpointCallback/highest"] == 1e6
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"best.ckpt", LAST}
    assert not (tmp_path / "old").exists()


def test_the_best_is_saved_by_a_metric_that_only_validation_has_and_not_at_all_without_a_metric(
    tmp_path: Path,
) -> None:
    run(tmp_path / "validated", rounds=3, best="validation/greedy_score")
    assert torch.load(tmp_path / "validated/best.ckpt", weights_only=True)["esper"]["counters"]["rounds"] == 2
    run(tmp_path / "none", rounds=1, best=None)
    assert [path.name for path in (tmp_path / "none").iterdir()] == [LAST]


def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([float("nan"), 2.0, float("inf"), 1.0])
    original = PPO.report_metrics

    def report(self: PPO, metrics: dict[str, float]) -> None:
        fake = {"episode/score": next(values)} if "episode/score" in metrics else {}
        original(self, {**metrics, **fake})

    monkeypatch.setattr(PPO, "report_metrics", report)
    run(tmp_path)
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["esper"]["counters"]["rounds"] == 2


@pytest.mark.parametrize("version", [1, 2])
def test_a_checkpoint_of_a_policy_for_a_fixed_number_of_slots_is_refused(tmp_path: Path, version: int) -> None:
    run(tmp_path, rounds=1)
    saved = torch.load(tmp_path / LAST, weights_only=True)
    saved["esper"]["version"] = version
    torch.save(saved, tmp_path / LAST)
    sentence = rf"last\.ckpt: has version {version}, of a policy for a fixed number of slots; .*: train .* again\.$"
    with pytest.raises(ValueError, match=sentence):
        read_checkpoint(tmp_path / LAST)


def test_a_resumed_run_may_leave_out_callbacks_of_the_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, rounds=1)
    saved = torch.load(tmp_path / LAST, weights_only=True)
    torch.save({**saved, "callbacks": {**saved["callbacks"], "Removed": {"count": 1}}}, tmp_path / LAST)
    module, _ = run(tmp_path, rounds=2)  # warnings are errors here
    assert module.counters.rounds == 2
