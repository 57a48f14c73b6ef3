from dataclasses import replace
from typing import Any

import pytest
import torch

from esper.lifecycle import HEAD_NAMES
from esper.ppo import PPO, DivergedError, ReturnScale, Rollout
from esper.ppo.module import ADAM_EPS, KL_MARGIN, PATIENCE
from esper.ppo.update import StepCounts, minibatch_loss, prepare_targets
from tests.controllers.fixtures_policies import draws
from tests.ppo.fixtures_environments import Locks, fit, learner, played, settings


def ready(world: Locks | None = None, **changes: Any) -> tuple[PPO, Rollout, Any]:
    world = world or Locks()
    module = learner(world, **changes)
    rollout = played(module, world)
    return module, rollout, prepare_targets(rollout, module.policy, module.scale, module.settings)


def loss_of(module: PPO, rollout: Rollout, targets: Any, rows: torch.Tensor | None = None) -> Any:
    rows = torch.arange(len(rollout.episode_seeds)) if rows is None else rows
    counts = StepCounts.of(rollout, targets, rows)
    return minibatch_loss(module.policy, rollout, targets, rows, counts, module.settings, 0.01)


@pytest.mark.parametrize("actions", ["core", "full"])
def test_before_the_first_step_every_ratio_is_1_and_the_kl_0(actions: str) -> None:
    module, rollout, targets = ready(Locks(actions=actions))
    _, figures = loss_of(module, rollout, targets)
    assert figures.largest.item() == pytest.approx(1, abs=1e-5)
    assert figures.smallest.item() == pytest.approx(1, abs=1e-5)
    assert figures.kl.sum().item() == pytest.approx(0, abs=1e-6)


def test_a_second_round_too_starts_at_ratio_1_though_the_statistics_have_moved() -> None:
    world = Locks()
    module = learner(world)
    fit(module, world, rounds=2, warmup=2)
    rollout = played(module, world)
    _, figures = loss_of(module, rollout, prepare_targets(rollout, module.policy, module.scale, module.settings))
    assert figures.largest.item() == pytest.approx(1, abs=1e-5)


def test_a_head_learns_only_from_steps_where_it_took_part() -> None:
    """With WAIT everywhere, slot and blueprint have nothing to learn from the advantages; the op has."""
    _, rollout, targets = ready()
    waited = rollout.action[..., 0] == 0
    assert not targets.active[waited][:, 1:].any()
    assert targets.active[waited & rollout.valid][:, 0].all()
    assert not targets.active[~rollout.valid].any()


def test_heads_that_no_op_asked_get_no_gradient_from_the_surrogate_but_stay_in_the_graph() -> None:
    module, rollout, targets = ready()
    rollout.action.zero_()
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
    rows = torch.arange(4)
    loss, _ = minibatch_loss(
        module.policy, rollout, targets, rows, StepCounts.of(rollout, targets, rows), module.settings, bonus=0.0
    )
    loss.backward()
    for name, head in module.policy.heads.items():
        for parameter in head.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.any()) is (name == "op")


def test_pieces_of_a_minibatch_add_up_to_the_whole() -> None:
    module, rollout, targets = ready()
    module.settings = replace(module.settings, accumulate=1)
    whole, figures = loss_of(module, rollout, targets)
    rows = torch.arange(4)
    counts = StepCounts.of(rollout, targets, rows)
    parts = [
        minibatch_loss(module.policy, rollout, targets, some, counts, module.settings, 0.01) for some in rows.split(1)
    ]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    total = parts[0][1]
    for _, more in parts[1:]:
        total = total + more
    torch.testing.assert_close(total.entropy, figures.entropy)
    torch.testing.assert_close(total.clipped, figures.clipped)


@pytest.mark.parametrize("change", [{"accumulate": 4}, {"accumulate": 2}])
def test_accumulating_by_episodes_changes_no_result(change: dict[str, int]) -> None:
    plain, pieces = learner(Locks()), learner(Locks(), **change)
    for module in (plain, pieces):
        fit(module, Locks(), rounds=2)
    for mine, theirs in zip(plain.policy.parameters(), pieces.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_a_heads_loss_is_its_mean_over_active_steps_or_over_all() -> None:
    module, rollout, targets = ready(entropy=0.0, value_coef=0.0)
    rows = torch.arange(4)
    rollout.log_prob -= 0.05
    counts = StepCounts.of(rollout, targets, rows)
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


def test_a_critic_of_whole_episodes_learns_what_they_come_to_and_one_of_the_rest_what_is_left() -> None:
    for value_target in ("episode", "rest"):
        module, rollout, _ = ready(value_target=value_target, lam=1.0, gamma=1.0)
        targets = prepare_targets(rollout, module.policy, module.scale, module.settings)
        wholes, rests = rollout.reward.sum(1, keepdim=True), rollout.reward.flip(1).cumsum(1).flip(1)
        wanted = (wholes if value_target == "episode" else rests).expand_as(rollout.reward)
        found = module.scale.unscaled(targets.returns)
        torch.testing.assert_close(found[rollout.valid], wanted[rollout.valid], atol=1e-4, rtol=1e-4)


def test_what_was_paid_already_teaches_nothing_whatever_the_critic_foretells() -> None:
    module, rollout, _ = ready(value_target="rest", gamma=1.0)
    paid = rollout.reward.cumsum(1)
    shifted = replace(
        rollout,
        value=module.scale.scaled(module.scale.unscaled(rollout.value) + paid - rollout.reward),
        next_value=module.scale.scaled(module.scale.unscaled(rollout.next_value) + paid),
    )
    whole, _, _ = ready(value_target="episode", gamma=1.0)
    whole.scale.load_state_dict(module.scale.state_dict())
    rest = prepare_targets(rollout, module.policy, module.scale, module.settings)
    same = prepare_targets(shifted, whole.policy, whole.scale, whole.settings)
    torch.testing.assert_close(same.advantages, rest.advantages, atol=1e-4, rtol=1e-4)
    for figure in ("losses/explained_variance", "policy/return_mean", "policy/value_std"):
        assert same.figures[figure] == pytest.approx(rest.figures[figure], abs=1e-4)


def test_whole_episodes_are_foretold_where_nothing_is_discounted() -> None:
    assert settings(value_target=None, gamma=1.0).predicts_episode_return
    assert not settings(value_target=None, gamma=0.99).predicts_episode_return
    assert not settings(value_target="rest", gamma=1.0).predicts_episode_return


def test_advantages_are_normalised_over_decision_steps_only() -> None:
    _, _, targets = ready()
    chosen = targets.advantages[targets.decision]
    assert chosen.mean().item() == pytest.approx(0, abs=1e-5)
    assert chosen.std(unbiased=False).item() == pytest.approx(1, abs=1e-4)
    assert torch.equal(targets.decision, targets.active.any(-1))


def test_an_update_stops_before_the_step_that_would_follow_too_large_a_kl() -> None:
    world = Locks()
    free, held = learner(world, epochs=10, target_kl=None), learner(world, epochs=10, target_kl=1e-4)
    for module in (free, held):
        fit(module, Locks(), rounds=1)
    assert free.counters.updates == 10
    assert free.latest_metrics["policy/kl_stop"] == 0
    assert 1 <= held.counters.updates < 10
    assert held.latest_metrics["policy/kl_stop"] == 1
    assert held.latest_metrics["policy/kl"] > KL_MARGIN * 1e-4
    assert KL_MARGIN == 1.5


def test_minibatches_are_whole_episodes_in_an_order_of_the_rounds_own() -> None:
    seen: list[list[int]] = []
    world = Locks()
    module = learner(world, epochs=2, minibatches=2, target_kl=None)
    original = module._gradients

    def spy(rollout: Rollout, targets: Any, rows: torch.Tensor) -> Any:
        seen.append(rows.tolist())
        return original(rollout, targets, rows)

    module._gradients = spy  # type: ignore[method-assign]
    fit(module, world, rounds=2)
    passes = [sorted(seen[i] + seen[i + 1]) for i in range(0, len(seen), 2)]
    assert passes == [[0, 1, 2, 3]] * 4
    assert len({tuple(map(tuple, seen[i : i + 2])) for i in range(0, 8, 2)}) > 1


def broken(module: PPO, times: int) -> list[int]:
    """Let the gradients of the first so many minibatches be not finite."""
    original, left = module._gradients, [times]

    def gradients(*given: Any) -> Any:
        figures, norm = original(*given)
        left[0] -= 1
        return figures, float("nan") if left[0] >= 0 else norm

    module._gradients = gradients  # type: ignore[method-assign]
    return left


def test_a_minibatch_that_is_not_finite_is_skipped_and_counted() -> None:
    world = Locks()
    module = learner(world, epochs=2, target_kl=None)
    before = [parameter.clone() for parameter in module.policy.features.parameters()]
    broken(module, 2)
    fit(module, world, rounds=1)
    assert module.counters.skipped == 2
    assert module.counters.updates == 0
    assert module.latest_metrics["policy/kl"] != module.latest_metrics["policy/kl"], "no update has no figures"
    assert all(torch.equal(a, b) for a, b in zip(before, module.policy.features.parameters(), strict=True))
    fit(module, world, rounds=1)
    assert module.counters.bad == 0
    assert module.counters.updates == 2


class Windfall(Locks):
    """Pays without measure in its first round."""

    rounds = 0

    def reset(self, seeds: Any) -> Any:
        self.rounds += 1
        return super().reset(seeds)

    def step(self, action: torch.Tensor) -> Any:
        paid = super().step(action)
        return replace(paid, reward=paid.reward * torch.inf) if self.rounds == 1 else paid


def test_a_round_that_is_not_finite_leaves_weights_and_statistics_as_they_were() -> None:
    world = Windfall()
    module = learner(world, epochs=2)
    before = {name: value.clone() for name, value in module.state_dict().items() if "_statistics" not in name}
    fit(module, world, rounds=1)
    assert module.counters.skipped == 2
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items() if name in before)
    fit(module, world, rounds=1)
    assert module.counters.updates > 0
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_three_bad_updates_in_a_row_stop_the_run_with_a_sentence() -> None:
    world = Locks()
    module = learner(world, epochs=1)
    broken(module, 100)
    with pytest.raises(DivergedError, match=r"3 updates in a row.*not finite.*after round 3"):
        fit(module, world, rounds=10)
    assert module.counters.rounds == PATIENCE == 3


def test_only_the_critic_decays_and_adam_has_its_epsilon() -> None:
    module = learner(Locks(), weight_decay=0.1)
    groups = {group["name"]: group for group in module.configure_optimizers().param_groups}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {"actor": 0, "critic": 0.1, "shared": 0}
    assert all(group["eps"] == ADAM_EPS == 1e-5 for group in groups.values())
    held = [parameter for group in groups.values() for parameter in group["params"]]
    assert len(held) == len(set(map(id, held))) == len(list(module.policy.parameters()))


def test_every_head_reports_entropy_kl_and_gradient_by_the_head_tables_names() -> None:
    world = Locks(actions="full")
    module = learner(world)
    fit(module, world, rounds=1)
    for head in HEAD_NAMES:
        assert {f"policy/entropy_{head}", f"policy/kl_{head}", f"health/gradient_{head}"} <= set(module.latest_metrics)
    assert module.latest_metrics["health/gradient_norm"] >= module.latest_metrics["health/gradient_op"]
    assert sum(module.latest_metrics[f"policy/op_{op}"] for op in world.layout.ops) == pytest.approx(1)


def test_the_learning_rate_and_entropy_bonus_follow_rounds_done_and_nothing_else() -> None:
    world = Locks()
    module = learner(world, lr=1e-3, lr_final=5e-4, lr_rounds=2, entropy=0.1, entropy_final=0.0, entropy_rounds=4)
    seen = []
    for _ in range(3):
        fit(module, world, rounds=1)
        seen.append(module.latest_metrics["policy/entropy_bonus"])
    assert seen == pytest.approx([0.1, 0.075, 0.05])


def test_the_critics_values_stay_what_they_are_when_the_return_scale_moves() -> None:
    module = learner(Locks())
    core = torch.randn(5, 16, generator=draws())
    before = module.scale.unscaled(module.policy.critic(core))
    module.scale.fold(torch.tensor([4.0, 40.0, 500.0], dtype=torch.float64), module.policy.critic)
    assert module.scale.mean == 10
    assert module.scale.std == 5
    torch.testing.assert_close(module.scale.unscaled(module.policy.critic(core)), before, atol=1e-4, rtol=1e-4)


def test_returns_survive_scaling() -> None:
    scale = ReturnScale()
    returns = torch.tensor([3.0, -1.0])
    assert torch.equal(scale.scaled(returns), returns), "until returns were seen"
    scale.statistics.mean.fill_(2.0)
    scale.statistics.variance.fill_(9.0)
    torch.testing.assert_close(scale.unscaled(scale.scaled(returns)), returns)


def test_hosts_are_no_parameters_of_the_module() -> None:
    world = Locks()
    module = learner(world)
    collector = fit(module, world, rounds=1)
    assert collector.environment is world
    assert {name.split(".")[0] for name in module.state_dict()} == {"policy", "scale"}


def test_the_loss_runs_on_the_meta_device() -> None:
    module, rollout, targets = ready(net={"validate": False})
    meta = torch.device("meta")
    module.to(meta)
    moved = {name: value.to(meta) for name, value in vars(targets).items() if isinstance(value, torch.Tensor)}
    loss, _ = loss_of(module, rollout.to(meta), replace(targets, **moved), torch.arange(4, device=meta))
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.policy.parameters())


def test_it_learns_heads_that_depend_on_each_other_behind_masks() -> None:
    """Waiting pays 0, guessing 1 in 6, knowing slot and blueprint 1 each step."""
    world = Locks(envs=16, steps=4)
    module = learner(world, lr=1e-2, entropy=0.01, entropy_final=None)
    fit(module, world, rounds=1)
    first = module.latest_metrics["episode/score"]
    fit(module, world, rounds=39)
    assert first < 1.5
    assert module.latest_metrics["episode/score"] > 3.4, "of 4, or of 3 in the episode that ends early"
