from dataclasses import replace

import pytest
import torch

from esper.ppo import DecisionBudget, RoundLoader, StaleRolloutError, StoppedError
from esper.rng import derive_seed
from tests.ppo.fixtures_environments import (
    MatchingEnv,
    RoundStepsEnv,
    TaskEnv,
    fit,
    make_collector,
    make_module,
    make_settings,
    make_trainer,
    run_round,
)


def test_a_round_loader_has_a_length_and_runs_a_round_each_time() -> None:
    count = []
    rounds = RoundLoader([lambda: count.append(1)])  # type: ignore[list-item, return-value]
    assert len(rounds) == 1
    assert count == []
    for _ in range(2):
        list(rounds)
    assert count == [1, 1]


def test_each_round_is_run_by_the_policy_after_the_last_update() -> None:
    """A prefetched rollout would have log-probabilities of older weights."""
    env = MatchingEnv()
    module = make_module(env)
    is_equal = []
    original = module.training_step

    def spy(rollout: object, batch_idx: int) -> None:
        again = run_round(module, MatchingEnv(), episode_seeds=rollout.episode_seeds)  # type: ignore[attr-defined]
        is_equal.append(torch.equal(again.log_prob, rollout.log_prob))  # type: ignore[attr-defined]
        original(rollout, batch_idx)  # type: ignore[arg-type]

    module.training_step = spy  # type: ignore[assignment, method-assign]
    fit(module, env, rounds=3)
    assert is_equal == [True, True, True]


@pytest.mark.parametrize("collected", [0, 2])
def test_a_rollout_that_was_not_collected_by_the_current_policy_is_refused(collected: int) -> None:
    """As it would be if rounds were prefetched, whatever the data fetcher does."""
    env = MatchingEnv()
    module = make_module(env)
    fit(module, env, rounds=1)
    rollout = replace(run_round(module, env), rounds_done=collected)
    with pytest.raises(StaleRolloutError, match=rf"^ppo: the rollout was collected after round {collected}, but"):
        module.training_step(rollout, 0)
    assert module.counters.rounds == 1


def test_a_rollout_has_the_number_of_rounds_that_were_done() -> None:
    env = MatchingEnv()
    module = make_module(env)
    assert run_round(module, env).rounds_done == 0
    fit(module, env, rounds=2)
    assert run_round(module, env).rounds_done == 2


def test_episodes_of_different_length_are_padded_rows() -> None:
    env = MatchingEnv(envs=3, steps=5)
    rollout = run_round(make_module(env), env)
    assert rollout.valid.sum(1).tolist() == [5, 4, 5]
    assert rollout.terminated.sum(1).tolist() == [1, 1, 1]
    assert rollout.terminated[1, 3]
    assert not rollout.reward[1, 4]


def test_the_value_after_each_action_is_that_of_the_next_observation() -> None:
    env = MatchingEnv(end="truncate")
    module = make_module(env)
    rollout = run_round(module, env)
    assert torch.equal(rollout.next_value[0, :-1], rollout.value[0, 1:])
    assert rollout.truncated[0, -1]
    base, slots = rollout.base[:1], rollout.slots[:1]
    with torch.no_grad():
        context = rollout.context[torch.tensor([0])]
        output = module.policy(base, slots, rollout.blueprints[:1], module.policy.begin(1), context)
        last = env._inputs()
        sequences = (last.base[:1, None], last.slots[:1, None], last.blueprints[:1, None])
        following = module.policy(*sequences, output.state, context)
    torch.testing.assert_close(rollout.next_value[0, -1], following.value[0, 0])


def test_an_episode_that_reaches_the_last_step_is_truncated() -> None:
    env = MatchingEnv(steps=5)
    env.steps = 3
    rollout = run_round(make_module(env), env)
    assert rollout.truncated[:, -1].all()
    assert not rollout.terminated.any()


def test_training_and_validation_have_different_episode_seeds_and_training_never_repeats_one() -> None:
    env, rounds = MatchingEnv(), []
    module = make_module(env)

    class SeedListener:
        def on_round_start(self, kind: str, episode_seeds: list[int], steps: int) -> None:
            rounds.append((kind, list(episode_seeds)))

        def on_step(self, action: torch.Tensor, step: object) -> None: ...

        def on_round_end(self, rollout: object) -> None: ...

    collector = make_collector(module, env, listeners=[SeedListener()])
    make_trainer(2, limit_val_batches=1.0).fit(module, datamodule=collector)
    training = [seeds for kind, seeds in rounds if kind == "training"]
    assert [seed for seeds in training for seed in seeds] == [derive_seed("training", 0, index) for index in range(8)]
    held_out = [seeds for kind, seeds in rounds if kind in ("sampled", "greedy")]
    assert len(held_out) == 4
    assert all(seeds == held_out[0] for seeds in held_out)
    assert not set(held_out[0]) & {seed for seeds in training for seed in seeds}


def test_validation_does_not_change_training() -> None:
    weights = []
    for batches in (0, 1.0):
        env = MatchingEnv()
        module = make_module(env)
        fit(module, env, rounds=2, warmup=3, limit_val_batches=batches)
        weights.append(module.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_statistics_are_constant_in_a_rollout_and_updated_before_the_update() -> None:
    env = MatchingEnv()
    module = make_module(env)
    rollout = run_round(module, env)
    assert module.policy.base_statistics.count == 0
    assert torch.equal(rollout.base, rollout.raw_base)
    fit(module, env, rounds=1, warmup=0)
    assert module.policy.base_statistics.count == 4 * 5 - 1
    assert not torch.equal(run_round(module, env).base, rollout.base)


def test_a_warm_up_gives_the_first_statistics_and_runs_once() -> None:
    env = MatchingEnv()
    module = make_module(env)
    fit(module, env, rounds=2, warmup=2)
    assert module.policy.base_statistics.count == 2 * 4 + 2 * 19


def test_a_run_that_stopped_after_its_warm_up_does_not_warm_up_again() -> None:
    env = MatchingEnv()
    module = make_module(env)
    fit(module, env, rounds=1, warmup=2)
    module.counters.rounds = 0
    fit(module, env, rounds=1, warmup=2)
    assert module.policy.base_statistics.count == 2 * 4 + 2 * 19


def test_a_run_that_stops_in_validation_finishes_the_validation() -> None:
    env, rounds = MatchingEnv(), []
    module = make_module(env)

    class StoppingListener:
        def on_round_start(self, kind: str, episode_seeds: list[int], steps: int) -> None:
            rounds.append(kind)
            if kind == "sampled":
                collector.stop_reason = "SIGINT"

        def on_step(self, action: torch.Tensor, step: object) -> None: ...

        def on_round_end(self, rollout: object) -> None: ...

    collector = make_collector(module, env, listeners=[StoppingListener()])
    with pytest.raises(StoppedError):
        make_trainer(3, limit_val_batches=1.0).fit(module, datamodule=collector)
    assert rounds == ["training", "sampled", "greedy"]
    assert module.counters.rounds == 1


def test_a_requested_stop_ends_the_run_before_an_update() -> None:
    env = MatchingEnv()
    module = make_module(env)
    collector = make_collector(module, env)
    collector.stop_reason = "SIGINT"
    with pytest.raises(StoppedError, match="SIGINT"):
        make_trainer().fit(module, datamodule=collector)
    assert module.counters.rounds == 0


def test_a_budget_of_decisions_is_never_exceeded() -> None:
    env = MatchingEnv()
    module = make_module(env)
    budget = DecisionBudget(60, round_decisions=20)
    make_trainer(100, callbacks=[budget]).fit(module, datamodule=make_collector(module, env))
    assert module.counters.decisions == 57, "three rounds of 19; a fourth might take 20"


def test_a_run_without_a_budget_for_another_round_runs_none() -> None:
    env = MatchingEnv()
    module = make_module(env)
    fit(module, env, rounds=1)
    fit(module, env, rounds=100, callbacks=[DecisionBudget(30, round_decisions=20)])
    assert module.counters.rounds == 1


def test_a_policy_for_slots_in_another_order_is_refused() -> None:
    env = MatchingEnv()
    module = make_module(env)
    env.layout = replace(env.layout, slots=env.layout.slots[::-1])
    with pytest.raises(ValueError, match="policy: its slots, heads and features must be those of the environment"):
        run_round(module, env)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"collector.warmup=-1"):
        make_collector(make_module(MatchingEnv()), MatchingEnv(), warmup=-1)
    with pytest.raises(ValueError, match=r"^decisions=19: must be at least 20, the decisions of one round\.$"):
        DecisionBudget(19, round_decisions=20)
    for change, sentence in (
        ({"epochs": 0}, "ppo.epochs=0: must be at least 1"),
        ({"lr": 0.0}, "ppo.lr=0.0: must be above 0"),
        ({"gamma": 1.5}, "ppo.gamma=1.5: must be between 0 and 1"),
        ({"target_kl": 0.0}, "ppo.target_kl=0.0"),
        ({"value_target": "episode", "gamma": 0.9}, "ppo.value_target=episode: must be rest if gamma=0.9 is not 1"),
        ({"entropy": -1.0}, "ppo.entropy=-1.0: must be at least 0"),
        ({"critic_epochs": 0}, "ppo.critic_epochs=0: must be at least 1"),
        ({"advantage_shrinkage": 1.0}, "ppo.advantage_shrinkage=1.0: must be at least 0 and below 1"),
        ({"baseline": "leave_one_out", "gamma": 0.9}, "ppo.baseline=leave_one_out: must be critic unless the critic"),
        ({"critic_warmup": 1}, "ppo.critic_warmup=1: must be 0 unless ppo.critic is separate"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_settings(**change)
    with pytest.raises(ValueError, match=r"ppo.entropy_weights: slt is not a head"):
        make_module(MatchingEnv(), entropy_weights={"slt": 1.0})


def test_a_rollout_knows_which_episodes_have_the_same_task() -> None:
    env = MatchingEnv()
    module = make_module(env)
    assert run_round(module, env).tasks.tolist() == [0] * env.envs
    env.task_number = lambda episode_seed: episode_seed % 3  # type: ignore[attr-defined]
    rollout = run_round(module, env)
    assert rollout.tasks.tolist() == [episode_seed % 3 for episode_seed in rollout.episode_seeds]


def test_training_rounds_have_each_number_of_steps_in_turn_and_validation_that_of_the_environment() -> None:
    env = RoundStepsEnv()
    module, lengths = make_module(env), []
    for done in range(9):
        module.counters.rounds = done
        rollout = run_round(module, env)
        lengths.append(rollout.valid.shape[1])
        assert rollout.valid.sum(1).tolist() == [lengths[-1], lengths[-1] - 1, lengths[-1], lengths[-1]]
    assert all(sorted(lengths[block : block + 3]) == [3, 5, 8] for block in (0, 3, 6))
    assert len({tuple(lengths[block : block + 3]) for block in (0, 3, 6)}) > 1, "the order differs"
    assert run_round(module, env, "greedy").valid.shape[1] == 5


def test_a_rollout_has_the_numbers_and_descriptors_of_its_tasks() -> None:
    env = TaskEnv()
    rollout = run_round(make_module(env), env)
    assert rollout.tasks.tolist() == [7, 7, 90, 90]
    assert rollout.task_features.tolist() == [[7, 0], [7, 0], [90, 0], [90, 0]]
    assert run_round(make_module(MatchingEnv()), MatchingEnv()).task_features.shape == (4, 0)
