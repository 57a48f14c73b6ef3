from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from esper.lifecycle import HEAD_NAMES
from esper.ppo import PPO, DivergedError, ReturnScale, Rollout
from esper.ppo.module import ADAM_EPS, KL_MARGIN, PATIENCE, round_samples
from esper.ppo.update import StepCounts, minibatch_loss, prepare_targets
from tests.controllers.fixtures_policies import draws
from tests.ppo.fixtures_environments import ForcedEnv, MatchingEnv, fit, make_module, make_settings, run_round


def prepare(env: MatchingEnv | None = None, **changes: Any) -> tuple[PPO, Rollout, Any]:
    env = env or MatchingEnv()
    module = make_module(env, **changes)
    rollout = run_round(module, env)
    return module, rollout, prepare_targets(rollout, module.policy, module.scale, module.settings)


def compute_loss(module: PPO, rollout: Rollout, targets: Any, rows: torch.Tensor | None = None) -> Any:
    rows = torch.arange(len(rollout.episode_seeds)) if rows is None else rows
    counts = StepCounts.of(targets, rows)
    return minibatch_loss(module.policy, rollout, targets, rows, counts, module.settings, 0.01)


@pytest.mark.parametrize("actions", ["core", "full", "lean"])
def test_before_the_first_optimizer_step_every_ratio_is_1_and_the_kl_is_0(actions: str) -> None:
    module, rollout, targets = prepare(MatchingEnv(actions=actions))
    _, metrics = compute_loss(module, rollout, targets)
    assert metrics.ratio_max.item() == pytest.approx(1, abs=1e-5)
    assert metrics.ratio_min.item() == pytest.approx(1, abs=1e-5)
    assert metrics.kl.sum().item() == pytest.approx(0, abs=1e-6)


def test_a_later_round_starts_at_ratio_1_after_the_statistics_have_changed() -> None:
    env = MatchingEnv()
    module = make_module(env)
    fit(module, env, rounds=2, warmup=2)
    rollout = run_round(module, env)
    _, metrics = compute_loss(module, rollout, prepare_targets(rollout, module.policy, module.scale, module.settings))
    assert metrics.ratio_max.item() == pytest.approx(1, abs=1e-5)


def test_a_head_is_active_only_on_steps_whose_op_uses_it() -> None:
    """On steps with WAIT only the op is active."""
    _, rollout, targets = prepare()
    is_wait = rollout.action[..., 0] == 0
    assert not targets.active[is_wait][:, 1:].any()
    assert targets.active[is_wait & rollout.valid][:, 0].all()
    assert not targets.active[~rollout.valid].any()


def test_heads_that_no_op_uses_have_a_surrogate_gradient_of_0_but_stay_in_the_graph() -> None:
    module, rollout, targets = prepare()
    rollout.action.zero_()
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    rows = torch.arange(4)
    loss, _ = minibatch_loss(
        module.policy, rollout, targets, rows, StepCounts.of(targets, rows), module.settings, entropy_bonus=0.0
    )
    loss.backward()
    for name, head in module.policy.heads.items():
        for parameter in head.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) is (name == "op")


def test_the_losses_of_chunks_add_up_to_that_of_the_minibatch() -> None:
    module, rollout, targets = prepare()
    module.settings = replace(module.settings, accumulate=1)
    whole, metrics = compute_loss(module, rollout, targets)
    rows = torch.arange(4)
    counts = StepCounts.of(targets, rows)
    parts = [
        minibatch_loss(module.policy, rollout, targets, chunk, counts, module.settings, 0.01) for chunk in rows.split(1)
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    total = parts[0][1]
    for _, other in parts[1:]:
        total = total + other
    torch.testing.assert_close(total.entropy, metrics.entropy)
    torch.testing.assert_close(total.clipped, metrics.clipped)


@pytest.mark.parametrize("change", [{"accumulate": 4}, {"accumulate": 2}])
def test_gradient_accumulation_does_not_change_the_result(change: dict[str, int]) -> None:
    plain, chunked = make_module(MatchingEnv()), make_module(MatchingEnv(), **change)
    for module in (plain, chunked):
        fit(module, MatchingEnv(), rounds=2)
    for expected, parameter in zip(plain.policy.parameters(), chunked.policy.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, atol=1e-4, rtol=1e-3)


def test_the_loss_of_a_head_is_its_mean_over_active_steps_or_over_all() -> None:
    module, rollout, targets = prepare(entropy=0.0, value_coef=0.0)
    rows = torch.arange(4)
    rollout.log_prob -= 0.05
    rollout.behaviour.copy_(rollout.log_prob)
    counts = StepCounts.of(targets, rows)
    losses = {}
    for weighting in ("active", "joint"):
        module.settings = replace(module.settings, head_weighting=weighting)
        losses[weighting] = minibatch_loss(module.policy, rollout, targets, rows, counts, module.settings, 0.0)[
            0
        ].item()
    gains = -targets.advantages[..., None] * targets.active * 1.0512711
    by_head = gains.sum((0, 1))
    assert losses["active"] == pytest.approx((by_head / targets.active.sum((0, 1)).clamp(min=1)).sum().item(), rel=1e-3)
    assert losses["joint"] == pytest.approx((by_head / rollout.valid.sum()).sum().item(), rel=1e-3)


def test_the_entropy_of_a_head_is_weighted_by_the_steps_where_it_is_available_or_as_its_loss() -> None:
    module, rollout, targets = prepare(value_coef=0.0)
    rows = torch.arange(4)
    targets = replace(targets, advantages=torch.zeros_like(targets.advantages))
    state = (rollout.state[0], rollout.state[1])
    output = module.policy(rollout.base, rollout.slots, rollout.blueprints, state, rollout.context)
    masks = rollout.masks.each(lambda mask: mask.flatten(0, 1))
    entropy = module.policy.distribution(output.logits, masks).entropy().view(rollout.action.shape)
    heads, counts = len(rollout.layout.head_names), StepCounts.of(targets, rows)
    losses, reported = {}, []
    for weighting in ("available", "joint"):
        module.settings = replace(module.settings, entropy_weighting=weighting)
        loss, metrics = minibatch_loss(module.policy, rollout, targets, rows, counts, module.settings, 1.0)
        losses[weighting] = -loss.item() * heads
        reported.append(metrics.entropy)
    available = (entropy * targets.available).sum((0, 1)) / targets.available.sum((0, 1)).clamp(min=1)
    assert losses["available"] == pytest.approx(available.sum().item(), rel=1e-4)
    assert losses["joint"] == pytest.approx((entropy * targets.active).sum().item() / rollout.decisions, rel=1e-4)
    assert torch.equal(*reported), "the metric has one meaning"


def test_steps_without_a_choice_are_left_out_of_the_critic_s_loss_and_of_all_means() -> None:
    env = ForcedEnv()
    module, rollout, targets = prepare(env, skip_forced=True, gamma=1.0, head_weighting="joint")
    steps = torch.arange(5).expand(4, -1)
    assert torch.equal(targets.learned, rollout.valid & (steps % 2 == 0))
    assert torch.equal(targets.learned, targets.decision)
    rows = torch.arange(4)
    counts = StepCounts.of(targets, rows)
    assert counts.learned == targets.learned.sum()
    _, _, kept = prepare(env, gamma=1.0)
    assert torch.equal(kept.learned, rollout.valid)
    assert kept.metrics["policy/forced"] == targets.metrics["policy/forced"] > 0.3
    expected = module.scale.denormalise(targets.returns)[targets.learned]
    assert module.scale.mean.item() == pytest.approx(expected.mean().item(), rel=1e-4)
    forced = rollout.valid & ~targets.learned
    loss, _ = compute_loss(module, rollout, targets)
    changed, _ = compute_loss(module, rollout, replace(targets, returns=torch.where(forced, 1e6, targets.returns)))
    assert changed.item() == loss.item()


def test_the_values_of_skipped_steps_do_not_change_advantages() -> None:
    env = ForcedEnv()
    _, rollout, targets = prepare(env, skip_forced=True, gamma=1.0)
    fresh = make_module(env, skip_forced=True, gamma=1.0)
    forced = rollout.valid & ~targets.learned
    after = torch.cat([forced[:, 1:], torch.zeros_like(forced[:, :1])], 1)
    other = replace(
        rollout,
        value=torch.where(forced, 50.0, rollout.value),
        next_value=torch.where(after, 50.0, rollout.next_value),
    )
    found = prepare_targets(other, fresh.policy, fresh.scale, fresh.settings)
    torch.testing.assert_close(found.advantages[targets.decision], targets.advantages[targets.decision])


def test_the_value_target_is_the_return_of_the_episode_or_of_its_rest() -> None:
    for value_target in ("episode", "rest"):
        module, rollout, _ = prepare(value_target=value_target, lam=1.0, gamma=1.0)
        targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
        episode_returns, rest_returns = rollout.reward.sum(1, keepdim=True), rollout.reward.flip(1).cumsum(1).flip(1)
        expected = (episode_returns if value_target == "episode" else rest_returns).expand_as(rollout.reward)
        returns = module.scale.denormalise(targets.returns)
        torch.testing.assert_close(returns[rollout.valid], expected[rollout.valid], atol=1e-4, rtol=1e-4)


def test_collected_reward_does_not_change_advantages_for_either_value_target() -> None:
    module, rollout, _ = prepare(value_target="rest", gamma=1.0)
    collected = rollout.reward.cumsum(1)
    shifted = replace(
        rollout,
        value=module.scale.normalise(module.scale.denormalise(rollout.value) + collected - rollout.reward),
        next_value=module.scale.normalise(module.scale.denormalise(rollout.next_value) + collected),
    )
    episode_module, _, _ = prepare(value_target="episode", gamma=1.0)
    episode_module.scale.load_state_dict(module.scale.state_dict())
    rest = prepare_targets(rollout, module.policy, module.scale, module.settings)
    episode = prepare_targets(shifted, episode_module.policy, episode_module.scale, episode_module.settings)
    torch.testing.assert_close(episode.advantages, rest.advantages, atol=1e-4, rtol=1e-4)
    for name in ("losses/explained_variance", "policy/return_mean", "policy/value_std"):
        assert episode.metrics[name] == pytest.approx(rest.metrics[name], abs=1e-4)


def test_a_constant_critic_explains_nothing_and_a_perfect_one_everything() -> None:
    for value_target in ("episode", "rest"):
        module, rollout, _ = prepare(value_target=value_target, gamma=1.0)
        scale, whole = module.scale, rollout.reward.sum(1, keepdim=True)
        collected = rollout.reward.cumsum(1)
        before = collected - rollout.reward
        right = (whole, whole) if value_target == "episode" else (whole - before, whole - collected)
        for (value, next_value), expected in (
            ((torch.tensor(0.3), torch.tensor(0.3)), 0),
            ((scale.normalise(before), scale.normalise(collected)), 0),
            ((scale.normalise(part) for part in right), 1),
        ):
            known = replace(
                rollout,
                value=value.expand_as(rollout.value).clone(),
                next_value=next_value.expand_as(rollout.value).clone(),
            )
            fresh = ReturnScale()
            fresh.load_state_dict(scale.state_dict())
            metrics = prepare_targets(known, module.policy, fresh, module.settings).metrics
            assert metrics["losses/explained_variance"] == pytest.approx(expected, abs=1e-4)


def test_the_default_value_target_is_the_episode_if_gamma_is_1() -> None:
    assert make_settings(value_target=None, gamma=1.0).predicts_episode_return
    assert not make_settings(value_target=None, gamma=0.99).predicts_episode_return
    assert not make_settings(value_target="rest", gamma=1.0).predicts_episode_return


def test_advantages_are_normalised_over_decision_steps_only() -> None:
    _, _, targets = prepare()
    chosen = targets.advantages[targets.decision]
    assert chosen.mean().item() == pytest.approx(0, abs=1e-5)
    assert chosen.std(unbiased=False).item() == pytest.approx(1, abs=1e-4)
    assert torch.equal(targets.decision, targets.active.any(-1))


def test_an_update_stops_before_the_next_step_when_the_kl_is_too_large() -> None:
    env = MatchingEnv()
    unlimited, limited = make_module(env, epochs=10, target_kl=None), make_module(env, epochs=10, target_kl=1e-4)
    for module in (unlimited, limited):
        fit(module, MatchingEnv(), rounds=1)
    assert unlimited.counters.updates == 10
    assert unlimited.latest_metrics["policy/kl_stop"] == 0
    assert 1 <= limited.counters.updates < 10
    assert limited.latest_metrics["policy/kl_stop"] == 1
    assert limited.latest_metrics["policy/kl"] > KL_MARGIN * 1e-4
    assert KL_MARGIN == 1.5


def test_minibatches_are_whole_episodes_shuffled_in_every_pass() -> None:
    minibatches: list[list[int]] = []
    env = MatchingEnv()
    module = make_module(env, epochs=2, minibatches=2, target_kl=None)
    original = module._compute_gradients

    def spy(rollout: Rollout, targets: Any, rows: torch.Tensor) -> Any:
        minibatches.append(rows.tolist())
        return original(rollout, targets, rows)

    module._compute_gradients = spy  # type: ignore[method-assign]
    fit(module, env, rounds=2)
    passes = [sorted(minibatches[i] + minibatches[i + 1]) for i in range(0, len(minibatches), 2)]
    assert passes == [[0, 1, 2, 3]] * 4
    assert len({tuple(map(tuple, minibatches[i : i + 2])) for i in range(0, 8, 2)}) > 1


def break_gradients(module: PPO, times: int) -> None:
    """Make the gradient norm of the first minibatches NaN, `times` times."""
    original, calls = module._compute_gradients, count()

    def compute_gradients(*args: Any) -> Any:
        metrics, norm = original(*args)
        return metrics, float("nan") if next(calls) < times else norm

    module._compute_gradients = compute_gradients  # type: ignore[method-assign]


def test_a_minibatch_with_non_finite_values_is_skipped_and_counted() -> None:
    env = MatchingEnv()
    module = make_module(env, epochs=2, target_kl=None)
    before = [parameter.clone() for parameter in module.policy.features.parameters()]
    break_gradients(module, 2)
    fit(module, env, rounds=1)
    assert module.counters.skipped == 2
    assert module.counters.updates == 0
    assert module.latest_metrics["policy/kl"] != module.latest_metrics["policy/kl"], "without an update there is no KL"
    assert all(torch.equal(a, b) for a, b in zip(before, module.policy.features.parameters(), strict=True))
    fit(module, env, rounds=1)
    assert module.counters.bad == 0
    assert module.counters.updates == 2


class InfiniteRewardEnv(MatchingEnv):
    """Has infinite rewards in its first round."""

    rounds = 0

    def reset(self, episode_seeds: Any) -> Any:
        self.rounds += 1
        return super().reset(episode_seeds)

    def step(self, action: torch.Tensor) -> Any:
        result = super().step(action)
        return replace(result, reward=result.reward * torch.inf) if self.rounds == 1 else result


def test_a_round_with_non_finite_values_changes_neither_weights_nor_statistics() -> None:
    env = InfiniteRewardEnv()
    module = make_module(env, epochs=2)
    before = {name: value.clone() for name, value in module.state_dict().items() if "_statistics" not in name}
    fit(module, env, rounds=1)
    assert module.counters.skipped == 2
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items() if name in before)
    fit(module, env, rounds=1)
    assert module.counters.updates > 0
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_three_consecutive_bad_updates_stop_the_run_with_a_sentence() -> None:
    env = MatchingEnv()
    module = make_module(env, epochs=1)
    break_gradients(module, 100)
    with pytest.raises(DivergedError, match=r"3 consecutive updates had non-finite.*after round 3"):
        fit(module, env, rounds=10)
    assert module.counters.rounds == PATIENCE == 3


def test_only_the_critic_has_weight_decay_and_adam_has_its_epsilon() -> None:
    module = make_module(MatchingEnv(), weight_decay=0.1)
    groups = {group["name"]: group for group in module.configure_optimizers().param_groups}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {"actor": 0, "critic": 0.1, "shared": 0}
    assert all(group["eps"] == ADAM_EPS == 1e-5 for group in groups.values())
    grouped = [parameter for group in groups.values() for parameter in group["params"]]
    assert len(grouped) == len(set(map(id, grouped))) == len(list(module.policy.parameters()))


def test_entropy_kl_and_gradient_are_reported_for_every_head_of_the_head_table() -> None:
    env = MatchingEnv(actions="full")
    module = make_module(env)
    fit(module, env, rounds=1)
    for head in HEAD_NAMES:
        assert {f"policy/entropy_{head}", f"policy/kl_{head}", f"health/gradient_{head}"} <= set(module.latest_metrics)
    assert module.latest_metrics["health/gradient_norm"] >= module.latest_metrics["health/gradient_op"]
    assert sum(module.latest_metrics[f"policy/op_{op}"] for op in env.layout.ops) == pytest.approx(1)


def test_the_entropy_bonus_depends_only_on_the_number_of_finished_rounds() -> None:
    env = MatchingEnv()
    module = make_module(env, lr=1e-3, lr_final=5e-4, lr_rounds=2, entropy=0.1, entropy_final=0.0, entropy_rounds=4)
    bonuses = []
    for _ in range(3):
        fit(module, env, rounds=1)
        bonuses.append(module.latest_metrics["policy/entropy_bonus"])
    assert bonuses == pytest.approx([0.1, 0.075, 0.05])


def test_values_of_the_critic_do_not_change_with_the_return_scale() -> None:
    module = make_module(MatchingEnv())
    core = torch.randn(5, 16, generator=draws())
    before = module.scale.denormalise(module.policy.critic(core))
    module.scale.fold(torch.tensor([4.0, 40.0, 500.0], dtype=torch.float64), module.policy.critic)
    assert module.scale.mean == 10
    assert module.scale.std == 5
    torch.testing.assert_close(module.scale.denormalise(module.policy.critic(core)), before, atol=1e-4, rtol=1e-4)


def test_denormalise_inverts_normalise() -> None:
    scale = ReturnScale()
    returns = torch.tensor([3.0, -1.0])
    assert torch.equal(scale.normalise(returns), returns), "before any return"
    scale.statistics.mean.fill_(2.0)
    scale.statistics.variance.fill_(9.0)
    torch.testing.assert_close(scale.denormalise(scale.normalise(returns)), returns)


def test_the_state_dict_has_policy_and_return_scale_only() -> None:
    env = MatchingEnv()
    module = make_module(env)
    collector = fit(module, env, rounds=1)
    assert collector.environment is env
    assert {name.split(".")[0] for name in module.state_dict()} == {"policy", "scale"}


def test_means_of_several_ranks_are_weighted_by_their_episodes_and_decisions() -> None:
    """A rank is another update of the same metric, as torchmetrics adds its sums."""
    envs = MatchingEnv(envs=2, steps=3), MatchingEnv(envs=4, steps=6)
    samples = [round_samples(run_round(make_module(env), env)) for env in envs]
    assert [len(each["episode/score"]) for each in samples] == [2, 4]
    assert [len(each["policy/op_WAIT"]) for each in samples] == [2 * 3 - 1, 4 * 6 - 1], "valid steps"
    for name in samples[0]:
        mean = MeanMetric(nan_strategy="disable")
        for each in samples:
            mean.update(each[name])
        assert mean.compute().item() == pytest.approx(torch.cat([each[name] for each in samples]).mean().item())


def test_round_metrics_do_not_carry_over_from_an_earlier_round() -> None:
    env = MatchingEnv()
    module = make_module(env)
    first, second = run_round(module, env), run_round(module, env, episode_seeds=range(7, 11))
    module._round_metrics(first)
    metrics = module._round_metrics(second)
    assert metrics["episode/score"] == second.outcome["score"].mean().item()
    assert metrics["episode/return"] == second.reward.sum(1).mean().item()


def test_the_loss_runs_on_the_meta_device() -> None:
    module, rollout, targets = prepare(network={"validate": False})
    meta = torch.device("meta")
    module.to(meta)
    moved = {name: value.to(meta) for name, value in vars(targets).items() if isinstance(value, torch.Tensor)}
    loss, _ = compute_loss(module, rollout.to(meta), replace(targets, **moved), torch.arange(4, device=meta))
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.policy.parameters())


def test_ppo_learns_masked_heads_that_depend_on_each_other() -> None:
    """Expected reward per step: 0 for WAIT, 1/6 for a random germination, 1 for the right slot and blueprint."""
    env = MatchingEnv(envs=16, steps=4)
    module = make_module(env, lr=1e-2, entropy=0.01, entropy_final=None)
    fit(module, env, rounds=1)
    first = module.latest_metrics["episode/score"]
    fit(module, env, rounds=39)
    assert first < 1.5
    assert module.latest_metrics["episode/score"] > 3.4, "of 4, or of 3 in the episode that ends early"
