from dataclasses import replace

import pytest
import torch

from esper.ppo import Collector, RoundLoader, StoppedError
from esper.rng import derive_seed
from tests.ppo.fixtures_environments import Locks, fit, learner, played, settings, trainer


def test_the_train_dataloader_has_length_1_and_plays_anew_each_time() -> None:
    count = []
    rounds = RoundLoader([lambda: count.append(1)])  # type: ignore[list-item, return-value]
    assert len(rounds) == 1
    assert count == []
    for _ in range(2):
        list(rounds)
    assert count == [1, 1]


def test_each_round_is_played_by_the_policy_that_the_last_update_left() -> None:
    """A rollout fetched ahead of its time would hold log-probabilities of older weights."""
    world = Locks()
    module = learner(world)
    seen = []
    original = module.training_step

    def spy(rollout: object, batch_idx: int) -> None:
        again = played(module, Locks(), seeds=rollout.episode_seeds)  # type: ignore[attr-defined]
        seen.append(torch.equal(again.log_prob, rollout.log_prob))  # type: ignore[attr-defined]
        original(rollout, batch_idx)  # type: ignore[arg-type]

    module.training_step = spy  # type: ignore[assignment, method-assign]
    fit(module, world, rounds=3)
    assert seen == [True, True, True]


def test_episodes_of_differing_length_are_padded_rows() -> None:
    world = Locks(envs=3, steps=5)
    rollout = played(learner(world), world)
    assert rollout.valid.sum(1).tolist() == [5, 4, 5]
    assert rollout.terminated.sum(1).tolist() == [1, 1, 1]
    assert rollout.terminated[1, 3]
    assert not rollout.reward[1, 4]


def test_the_value_after_each_action_is_that_of_the_next_observation() -> None:
    world = Locks(end="truncate")
    module = learner(world)
    rollout = played(module, world)
    assert torch.equal(rollout.next_value[0, :-1], rollout.value[0, 1:])
    assert rollout.truncated[0, -1]
    base, slots = rollout.base[:1], rollout.slots[:1]
    with torch.no_grad():
        output = module.policy(base, slots, rollout.blueprints[:1], module.policy.begin(1))
        last = world._inputs()
        after = module.policy(last.base[:1, None], last.slots[:1, None], last.blueprints[:1, None], output.state)
    torch.testing.assert_close(rollout.next_value[0, -1], after.value[0, 0])


def test_an_episode_cut_off_by_the_rooms_end_is_truncated() -> None:
    world = Locks(steps=5)
    world.steps = 3
    rollout = played(learner(world), world)
    assert rollout.truncated[:, -1].all()
    assert not rollout.terminated.any()


def test_training_and_validation_never_share_a_seed_and_training_seeds_go_on() -> None:
    world, seen = Locks(), []
    module = learner(world)

    class Notes:
        def on_round_start(self, kind: str, seeds: list[int], steps: int) -> None:
            seen.append((kind, list(seeds)))

        def on_step(self, action: torch.Tensor, step: object) -> None: ...

        def on_round_end(self, rollout: object) -> None: ...

    collector = Collector(world, run_seed=3, warmup=0, listeners=[Notes()])
    trainer(2, limit_val_batches=1.0).fit(module, datamodule=collector)
    training = [seeds for kind, seeds in seen if kind == "training"]
    assert [seed for seeds in training for seed in seeds] == [derive_seed("training", 3, index) for index in range(8)]
    held_out = [seeds for kind, seeds in seen if kind in ("sampled", "greedy")]
    assert len(held_out) == 4
    assert all(seeds == held_out[0] for seeds in held_out)
    assert not set(held_out[0]) & {seed for seeds in training for seed in seeds}


def test_validation_changes_nothing() -> None:
    weights = []
    for batches in (0, 1.0):
        world = Locks()
        module = learner(world)
        fit(module, world, rounds=2, warmup=3, limit_val_batches=batches)
        weights.append(module.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_statistics_are_frozen_in_a_rollout_and_taken_in_before_the_update() -> None:
    world = Locks()
    module = learner(world)
    rollout = played(module, world)
    assert module.policy.base_statistics.count == 0
    assert torch.equal(rollout.base, rollout.raw_base)
    fit(module, world, rounds=1, warmup=0)
    assert module.policy.base_statistics.count == 4 * 5 - 1
    assert not torch.equal(played(module, world).base, rollout.base)


def test_a_warm_up_gives_the_first_statistics_and_is_played_once() -> None:
    world = Locks()
    module = learner(world)
    fit(module, world, rounds=2, warmup=2)
    assert module.policy.base_statistics.count == 2 * 4 + 2 * 19


def test_a_run_that_had_warmed_up_when_it_was_stopped_does_not_warm_up_again() -> None:
    world = Locks()
    module = learner(world)
    fit(module, world, rounds=1, warmup=2)
    module.counters.rounds = 0
    fit(module, world, rounds=1, warmup=2)
    assert module.policy.base_statistics.count == 2 * 4 + 2 * 19


def test_a_round_is_closed_before_a_run_stops_in_its_validation() -> None:
    world, seen = Locks(), []
    module = learner(world)

    class Impatient:
        def on_round_start(self, kind: str, seeds: list[int], steps: int) -> None:
            seen.append(kind)
            if kind == "sampled":
                collector.stop_reason = "SIGINT"

        def on_step(self, action: torch.Tensor, step: object) -> None: ...

        def on_round_end(self, rollout: object) -> None: ...

    collector = Collector(world, run_seed=0, warmup=0, listeners=[Impatient()])
    with pytest.raises(StoppedError):
        trainer(3, limit_val_batches=1.0).fit(module, datamodule=collector)
    assert seen == ["training", "sampled", "greedy"]
    assert module.counters.rounds == 1


def test_a_run_that_should_stop_stops_between_two_steps() -> None:
    world = Locks()
    module = learner(world)
    collector = Collector(world, run_seed=0, warmup=0)
    collector.stop_reason = "SIGINT"
    with pytest.raises(StoppedError, match="SIGINT"):
        trainer().fit(module, datamodule=collector)
    assert module.counters.rounds == 0


def test_a_budget_of_decisions_is_never_passed() -> None:
    world = Locks()
    module = learner(world)
    collector = Collector(world, run_seed=0, warmup=0, budget=60)
    trainer(100).fit(module, datamodule=collector)
    assert module.counters.decisions == 57, "three rounds of 19; a fourth might take 20"


def test_a_policy_for_slots_in_another_order_is_refused() -> None:
    world = Locks()
    module = learner(world)
    world.layout = replace(world.layout, slots=world.layout.slots[::-1])
    with pytest.raises(ValueError, match="policy: was built for other slots"):
        played(module, world)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"collector.warmup=-1"):
        Collector(Locks(), run_seed=0, warmup=-1)
    for change, sentence in (
        ({"epochs": 0}, "ppo.epochs=0: must be a whole number of at least 1"),
        ({"lr": 0.0}, "ppo.lr=0.0: must be above 0"),
        ({"gamma": 1.5}, "ppo.gamma=1.5: must be between 0 and 1"),
        ({"target_kl": 0.0}, "ppo.target_kl=0.0"),
        ({"value_loss": "cubic"}, "ppo.value_loss=cubic: must be one of clipped, huber, squared"),
        ({"head_weighting": "none"}, "ppo.head_weighting=none: must be one of active, joint"),
        ({"value_target": "all"}, "ppo.value_target=all: must be one of episode, rest, null"),
        ({"value_target": "episode", "gamma": 0.9}, "ppo.value_target=episode: must be rest where gamma=0.9 discounts"),
        ({"entropy": -1.0}, "ppo.entropy=-1.0: must be at least 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            settings(**change)
    with pytest.raises(ValueError, match=r"ppo.entropy_weights: slt is no head"):
        learner(Locks(), entropy_weights={"slt": 1.0})
