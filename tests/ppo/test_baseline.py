from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer

from esper.ppo import PPO, Rollout
from esper.ppo.baseline import AdvantageScale, leave_one_out, pooled_variance
from esper.ppo.update import estimate_advantages, prepare_targets
from tests.controllers.fixtures_policies import draws
from tests.ppo.fixtures_environments import ForcedEnv, MatchingEnv, TaskEnv, fit, make_module, run_round

TASKS = torch.tensor([3, 3, 3, 900, 900, 5])
STEPS = 4
LEARNED = torch.ones(len(TASKS), STEPS, dtype=torch.bool)


class ScoreRecorder(Callback):
    """Records the mean score of each round."""

    def __init__(self) -> None:
        self.scores: list[float] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        self.scores.append(pl_module.latest_metrics["episode/score"])


def random_residuals(rng_seed: int = 0) -> torch.Tensor:
    return torch.randn(len(TASKS), STEPS, generator=draws(rng_seed))


def test_the_baseline_is_the_mean_of_the_other_episodes_of_the_task() -> None:
    residuals = random_residuals()
    found = leave_one_out(residuals, LEARNED, TASKS)
    torch.testing.assert_close(found[0], (residuals[1] + residuals[2]) / 2)
    torch.testing.assert_close(found[3], residuals[4])
    torch.testing.assert_close(found[5], residuals[:5].mean(0))  # the only episode of its task
    assert not leave_one_out(residuals[:1], LEARNED[:1], TASKS[:1]).any()


@given(st.integers(0, 10_000), st.integers(0, len(TASKS) - 1), st.floats(-100, 100))
def test_the_baseline_of_an_episode_does_not_depend_on_its_own_return(rng_seed: int, row: int, change: float) -> None:
    residuals = random_residuals(rng_seed)
    before = leave_one_out(residuals, LEARNED, TASKS)
    residuals[row] += change
    after = leave_one_out(residuals, LEARNED, TASKS)
    torch.testing.assert_close(after[row], before[row], atol=1e-5, rtol=1e-5)
    is_other_task = (TASKS[row] != TASKS) & (TASKS != 5)
    torch.testing.assert_close(after[is_other_task], before[is_other_task])


def test_an_episode_that_has_no_later_decision_counts_with_its_last_one() -> None:
    residuals, learned = random_residuals(), LEARNED.clone()
    learned[1, 2:] = False
    residuals[1, 2:] = 1e6
    found = leave_one_out(residuals, learned, TASKS)
    torch.testing.assert_close(found[0, 3], (residuals[1, 1] + residuals[2, 3]) / 2)
    learned[1] = False
    torch.testing.assert_close(leave_one_out(residuals, learned, TASKS)[0], residuals[2])


def make_loo_module(env: MatchingEnv, **changes: Any) -> PPO:
    return make_module(env, **{"baseline": "leave_one_out", "gamma": 1.0, **changes})


def prepare(env: MatchingEnv, **changes: Any) -> tuple[PPO, Rollout]:
    module = make_loo_module(env, **changes)
    return module, run_round(module, env)


def advantages_of(module: PPO, rollout: Rollout) -> torch.Tensor:
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings, module.critic,
                              AdvantageScale(0.5))  # fmt: skip
    return torch.where(targets.decision, targets.advantages, 0.0)


@pytest.mark.parametrize("step", [0, 2, -1], ids=["first", "middle", "last"])
@pytest.mark.parametrize("changes", [{}, {"skip_forced": True}, {"critic": "separate"}], ids=str)
def test_a_constant_in_all_returns_of_a_task_changes_no_advantage(step: int, changes: dict[str, Any]) -> None:
    kind = ForcedEnv if "skip_forced" in changes else MatchingEnv
    env = kind(envs=6, steps=5, end="terminate")
    _, rollout = prepare(env, **changes)
    rollout.tasks = torch.tensor([1, 1, 1, 8, 8, 8])
    # the second environment ends a step earlier, so its last step is its own
    place = rollout.valid.sum(1) - 1 if step == -1 else torch.full((6,), step)
    reward = rollout.reward.clone()
    reward[torch.arange(3), place[:3]] += 1000
    first, second = (advantages_of(make_loo_module(env, **changes), replace(rollout, reward=each))
                     for each in (rollout.reward, reward))  # fmt: skip
    assert first.any()
    torch.testing.assert_close(second, first, atol=2e-3, rtol=2e-3)


def test_with_lambda_1_the_advantage_is_the_residual_minus_that_of_the_others() -> None:
    module, rollout = prepare(MatchingEnv(), lam=1.0)
    values, next_values = torch.randn(2, *rollout.reward.shape, generator=draws())
    next_values[:, :-1] = values[:, 1:]
    found = estimate_advantages(rollout, values, next_values, rollout.valid, module.settings)
    rest = rollout.reward.flip(1).cumsum(1).flip(1)
    residuals = torch.where(rollout.valid, rest - values, 0.0)
    torch.testing.assert_close(found.residuals[rollout.valid], residuals[rollout.valid])
    expected = residuals - leave_one_out(residuals, rollout.valid, rollout.tasks)
    torch.testing.assert_close(found.advantages[rollout.valid], expected[rollout.valid])


def test_a_truncated_episode_is_judged_by_the_value_after_its_last_step() -> None:
    module, rollout = prepare(MatchingEnv(end="truncate"), lam=1.0)
    values = torch.zeros_like(rollout.reward)
    next_values = torch.where(rollout.truncated, 3.0, 0.0)
    found = estimate_advantages(rollout, values, next_values, rollout.valid, module.settings)
    rest = rollout.reward.flip(1).cumsum(1).flip(1) + 3
    expected = rest - leave_one_out(rest, rollout.valid, rollout.tasks)
    torch.testing.assert_close(found.advantages[rollout.valid], expected[rollout.valid])


def test_the_critic_learns_differences_from_the_other_episodes_of_the_task() -> None:
    env = TaskEnv(envs=6)
    module, rollout = prepare(env, lam=1.0)
    targets = prepare_targets(rollout, module.policy, module.scale, module.settings, None, AdvantageScale(0.5))
    totals = rollout.reward.sum(1)
    expected = (totals - totals[[1, 0, 3, 2, 5, 4]])[:, None].expand_as(rollout.reward)
    found = module.scale.denormalise(targets.returns)
    torch.testing.assert_close(found[rollout.valid], expected[rollout.valid], atol=1e-3, rtol=1e-3)
    assert module.scale.std < 10, "in units of such differences"


def test_a_task_without_anything_at_stake_has_tiny_advantages() -> None:
    """Its returns differ by noise only; those of the other task by points."""
    tasks, noise = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), draws()
    advantages = torch.randn(8, 5, generator=noise) * torch.where(tasks == 0, 0.001, 5.0).unsqueeze(1)
    decision, scale = torch.ones(8, 5, dtype=torch.bool), AdvantageScale(0.5)
    scale.fold(pooled_variance(advantages, decision, tasks))
    scaled = advantages / scale.std
    assert scaled[tasks == 0].abs().max() < 0.002
    assert 0.5 < scaled[tasks == 1].std().item() < 2


def test_the_scale_is_of_deviations_within_tasks_and_of_decisions_only() -> None:
    advantages = torch.tensor([[1.0, -1.0, 50.0], [1.0, -1.0, 50.0], [11.0, 9.0, 50.0], [11.0, 9.0, 50.0]])
    decision = torch.tensor([True, True, False]).expand(4, -1)
    assert pooled_variance(advantages, decision, torch.tensor([0, 0, 6, 6])) == 1
    assert pooled_variance(advantages, decision, torch.tensor([0, 0, 6, 7])) == (4 + 4 * 101) / 8


def test_the_scale_moves_slowly_and_ignores_non_finite_values() -> None:
    scale = AdvantageScale(0.75)
    scale.fold(torch.tensor(torch.nan))
    assert scale.std == 0
    scale.fold(torch.tensor(16.0))
    assert scale.std == 4, "the first round counts in full"
    scale.fold(torch.tensor(0.0))
    assert scale.variance == 12
    scale.fold(torch.tensor(torch.inf))
    assert scale.variance == 12


def test_a_run_learns_with_tasks_whose_levels_differ_by_far_more_than_its_rewards() -> None:
    env = TaskEnv(envs=16, steps=4)
    env.episode_seed = lambda purpose, run_seed, index: index % 16  # type: ignore[method-assign]
    module = make_module(env, lr=1e-2, entropy=0.01, entropy_final=None, baseline="leave_one_out", gamma=1.0)
    scores = ScoreRecorder()
    fit(module, env, rounds=40, callbacks=[scores])
    assert fmean(scores.scores[-10:]) > 1.5, "of 4; chance has less than 0.5"
    assert module.latest_metrics["policy/advantage_scale"] < 5
