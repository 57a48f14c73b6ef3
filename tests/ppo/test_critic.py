"""The separate critic: what it sees, how it is trained, and that acting does not need it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from esper.ppo import LAST, PPO, Critic, Rollout
from tests.ppo.fixtures_environments import (
    ForcedEnv,
    MatchingEnv,
    RoundStepsEnv,
    TaskEnv,
    fit,
    make_module,
    restore,
    run_round,
)
from tests.ppo.test_module import InfiniteRewardEnv
from tests.ppo.test_resume import KilledError, assert_same_content, content, run

ALL_PARTS: dict[str, Any] = {
    "critic": "separate",
    "critic_hidden": 8,
    "critic_epochs": 3,
    "baseline": "leave_one_out",
    "gamma": 1.0,
    "entropy_weighting": "joint",
    "skip_forced": True,
}


def make_critic(env: MatchingEnv, **changes: Any) -> tuple[PPO, Critic]:
    module = make_module(env, critic="separate", **changes)
    assert module.critic is not None
    torch.nn.init.normal_(module.critic.head[-1].weight)
    return module, module.critic


def weights_of(part: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in part.parameters()]


def is_changed(part: torch.nn.Module, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(part.parameters(), before, strict=True))


def test_acting_neither_has_nor_counts_a_separate_critic() -> None:
    env = MatchingEnv()
    shared, (separate, _) = make_module(env), make_critic(env)
    assert separate.policy.flops < shared.policy.flops
    assert not any(name.startswith("critic.") for name in separate.policy.state_dict())
    rollouts = run_round(shared, env), run_round(separate, env)
    assert torch.equal(rollouts[0].action, rollouts[1].action), "the policies have the same first weights"
    assert rollouts[1].value[rollouts[1].valid].isnan().all(), "not measured while acting"


def test_the_first_values_are_the_mean_return() -> None:
    env = MatchingEnv()
    module = make_module(env, critic="separate")
    assert module.critic is not None
    assert not module.critic.predict(run_round(module, env))[0].any()


def test_the_value_after_an_action_is_that_of_the_next_observation_and_at_the_end_of_the_final_one() -> None:
    env = MatchingEnv(end="truncate")
    module, critic = make_critic(env)
    rollout = run_round(module, env)
    values, next_values = critic.predict(rollout)
    is_valid = rollout.valid
    torch.testing.assert_close(values[is_valid], critic.values(rollout, torch.arange(env.envs))[is_valid])
    torch.testing.assert_close(next_values[:, :3], values[:, 1:4])
    for row, length in enumerate(rollout.valid.sum(1).tolist()):
        base = torch.cat([rollout.base[row, :length], rollout.final_base[row, None]])[None]
        slots = torch.cat([rollout.slots[row, :length], rollout.final_slots[row, None]])[None]
        blueprints = torch.cat([rollout.blueprints[row, :length], rollout.final_blueprints[row, None]])[None]
        context = rollout.context[torch.tensor([row])]
        expected = critic(base, slots, blueprints, context, rollout.task_features[row, None])[0, -1]
        torch.testing.assert_close(next_values[row, length - 1], expected)


def test_the_order_of_slots_has_no_effect() -> None:
    env = MatchingEnv()
    module, critic = make_critic(env)
    rollout = run_round(module, env)
    rollout.blueprints[:] = torch.tensor([1, 0, 3])
    rollout.slots.normal_()
    values = critic.values(rollout, torch.arange(4))
    order = torch.tensor([2, 0, 1])
    rollout.slots, rollout.blueprints = rollout.slots[:, :, order], rollout.blueprints[..., order]
    torch.testing.assert_close(critic.values(rollout, torch.arange(4)), values)


def test_descriptors_of_the_task_reach_the_critic_and_not_the_policy() -> None:
    env = TaskEnv()
    module, critic = make_critic(env)
    rollout = run_round(module, env)
    critic.fold_tasks(rollout)
    values, _ = critic.predict(rollout)
    rollout.task_features = rollout.task_features.flip(0)
    assert not torch.allclose(critic.predict(rollout)[0], values)
    assert rollout.base.shape[-1] == len(env.layout.base_inputs)
    assert critic.sizes["task_features"] == ["level", "nothing"]


def count_critic_passes(module: PPO) -> list[int]:
    """A list that grows by one with every minibatch of the critic."""
    counted, original = [], module._compute_critic_gradients

    def count(*args: Any) -> dict[str, float]:
        counted.append(1)
        return original(*args)

    module._compute_critic_gradients = count  # type: ignore[method-assign]
    return counted


def test_the_kl_stop_does_not_end_the_passes_of_the_critic() -> None:
    env = MatchingEnv()
    module, _ = make_critic(env, critic_epochs=7, minibatches=2, target_kl=1e-6)
    counted = count_critic_passes(module)
    fit(module, env)
    assert module.latest_metrics["policy/kl_stop"] == 1
    assert module.counters.updates < 7
    assert len(counted) == 14


def test_in_the_first_rounds_only_the_critic_learns() -> None:
    env = MatchingEnv()
    module, critic = make_critic(env, critic_warmup=1)
    policy, values = weights_of(module.policy), weights_of(critic)
    fit(module, env)
    assert not is_changed(module.policy, policy)
    assert is_changed(critic, values)
    assert module.latest_metrics["policy/epochs"] == 0
    assert module.latest_metrics["policy/kl"] == pytest.approx(0, abs=1e-6)
    fit(module, env)
    assert is_changed(module.policy, policy)


def test_each_part_reports_its_own_gradients() -> None:
    env = MatchingEnv()
    module, critic = make_critic(env)
    fit(module, env)
    metrics = module.latest_metrics
    for name in ("health/gradient_op", "health/gradient_value", "health/critic", "losses/value", "health/policy"):
        assert metrics[name] > 0, name
    passes = 1 + 3 * module.settings.critic_epochs
    assert metrics["policy/critic_gflops"] == pytest.approx(passes * critic.flops * module.counters.decisions / 1e9)


def test_a_separate_critic_learns_the_levels_of_tasks_from_their_descriptors() -> None:
    """The observations of both tasks are alike."""
    env = TaskEnv(envs=8, steps=3)
    env.episode_seed = lambda purpose, run_seed, index: index % 8  # type: ignore[method-assign]
    module, critic = make_critic(env, critic_epochs=30, gamma=1.0, critic_lr=1e-2)
    fit(module, env, rounds=12)
    rollout = run_round(module, env)
    values = module.scale.denormalise(critic.predict(rollout)[0])[:, 0]
    torch.testing.assert_close(values, rollout.reward.sum(1), atol=20, rtol=0)


@pytest.mark.parametrize("env_class", [ForcedEnv, TaskEnv, RoundStepsEnv])
def test_a_run_with_all_parts_continues_bit_exactly(
    env_class: type[MatchingEnv], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.ppo.test_resume.MatchingEnv", env_class)
    run(tmp_path / "whole", **ALL_PARTS)
    with pytest.raises(KilledError):
        run(tmp_path / "killed", {("training", 2, 1): "kill"}, **ALL_PARTS)
    run(tmp_path / "killed", **ALL_PARTS)
    whole = content(tmp_path / "whole")
    assert any(name.startswith("/optimizer_states/1/") for name in whole)
    assert any("advantage_scale" in name for name in whole)
    assert_same_content(content(tmp_path / "killed"), whole)


def test_a_checkpoint_with_another_critic_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run(tmp_path, rounds=1, **ALL_PARTS)
    env = MatchingEnv()
    for changes, sentence in (
        ({"critic": "shared"}, r"^ppo.critic=shared: the checkpoint .* has separate\.$"),
        ({"critic_hidden": 16}, r"^critic, hidden: this run has 16, but the checkpoint .* has 8\.$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            restore(make_module(env, **{**ALL_PARTS, **changes}), tmp_path / LAST)
    with pytest.raises(ValueError, match=r"^critic, task_features: this run has \['level', 'nothing'\], but the"):
        restore(make_module(TaskEnv(), **ALL_PARTS), tmp_path / LAST)


@pytest.mark.parametrize("baselines", [("critic", "leave_one_out"), ("leave_one_out", "critic")])
def test_a_resumed_run_may_have_another_baseline(baselines: tuple[str, str], tmp_path: Path) -> None:
    run(tmp_path, rounds=1, baseline=baselines[0], gamma=1.0)
    module, _ = run(tmp_path, rounds=2, baseline=baselines[1], gamma=1.0)
    assert module.counters.rounds == 2


def test_a_round_with_non_finite_values_changes_no_weights() -> None:
    env = InfiniteRewardEnv()
    module = make_module(env, epochs=2, **ALL_PARTS)
    before = {name: value.clone() for name, value in module.state_dict().items() if "_statistics" not in name}
    fit(module, env, rounds=1)
    assert module.counters.skipped == 2 + ALL_PARTS["critic_epochs"]
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items() if name in before)
    fit(module, env, rounds=1)
    assert module.counters.updates > 0
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_a_rollout_of_the_separate_critic_moves_between_devices() -> None:
    env = TaskEnv()
    module, critic = make_critic(env)
    rollout: Rollout = run_round(module, env).to(torch.device("meta"))
    critic.to("meta")
    assert critic.values(rollout, torch.arange(4, device="meta")).device.type == "meta"
