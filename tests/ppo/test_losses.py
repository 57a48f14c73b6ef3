import math
from typing import Any

import pytest
import torch

from esper.controllers.distribution import masked_log_probs
from esper.ppo.losses import (
    LOG_RATIO_BOUND,
    anneal,
    explained_variance,
    masked_mean,
    normalise,
    surrogate,
    value_loss,
)
from tests.controllers.fixtures_policies import draws


def test_the_surrogate_is_the_smaller_of_ratio_and_clipped_ratio_times_advantage() -> None:
    ratios, advantages = [0.5, 0.5, 1.5, 1.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0]
    expected = [0.5 * 1, 0.8 * -1, 1.2 * 1, 1.5 * -1, 1.1 * 2]
    for ratio, advantage, gain in zip(ratios, advantages, expected, strict=True):
        part = surrogate(
            torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.zeros(1, 1), torch.tensor([advantage]),
            torch.ones(1, 1, dtype=torch.bool), clip=0.2,
        )  # fmt: skip
        assert part.loss.item() == pytest.approx(-gain)


def test_only_active_head_steps_count_in_loss_kl_and_clipping() -> None:
    noise = draws()
    log_prob, old = torch.randn(2, 6, 3, generator=noise)
    active = torch.rand(6, 3, generator=noise) < 0.5
    advantages = torch.randn(6, generator=noise)
    part = surrogate(log_prob.requires_grad_(), old, old, advantages, active, clip=0.2)
    part.loss.sum().backward()
    assert log_prob.grad is not None
    assert not log_prob.grad[~active].any()
    ratio = (log_prob - old).exp().detach()
    torch.testing.assert_close(part.kl, ((ratio - 1 - ratio.log()) * active).sum(0))
    assert torch.equal(part.clipped, (((ratio - 1).abs() > 0.2) & active).sum(0))
    assert part.ratio_max == ratio.where(active, 1.0).amax()


def test_floors_take_no_gradient_from_rare_options() -> None:
    """The expected gradient over actions sampled with floors is that of the policy, computed over all actions."""
    logits = torch.tensor([3.0, 0.0, -4.0])
    advantages, mask = torch.tensor([0.3, -1.0, 2.0]), torch.ones(3, dtype=torch.bool)
    behaviour = masked_log_probs(logits, mask, floor=0.1)
    policy = logits.clone().requires_grad_()
    (policy.softmax(-1) * advantages).sum().backward()
    sampled = logits.clone().requires_grad_()
    log_prob = sampled.log_softmax(-1).unsqueeze(1)  # one step for each action, weighted by how often it is sampled
    part = surrogate(
        log_prob, log_prob.detach(), behaviour.unsqueeze(1), advantages * behaviour.exp(), mask.unsqueeze(1), clip=0.2
    )
    (-part.loss.sum()).backward()
    assert policy.grad is not None
    assert sampled.grad is not None
    torch.testing.assert_close(sampled.grad, policy.grad)
    assert part.ratio_max == part.ratio_min == 1


def test_the_loss_of_a_huge_ratio_is_finite() -> None:
    log_prob = torch.tensor([[500.0]], requires_grad=True)
    old, is_active = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    part = surrogate(log_prob, old, old, torch.tensor([-1.0]), is_active, clip=0.2)
    part.loss.sum().backward()
    assert part.loss.item() == pytest.approx(math.exp(LOG_RATIO_BOUND))
    assert log_prob.grad is not None
    assert torch.isfinite(log_prob.grad).all()


def test_no_active_step_gives_exactly_0_and_no_nan() -> None:
    log_prob = torch.zeros(4, 2, requires_grad=True)
    old, is_active = torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.bool)
    part = surrogate(log_prob, old, old, torch.ones(4), is_active, clip=0.2)
    mean = masked_mean(part.loss, torch.zeros(2))
    mean.sum().backward()
    assert mean.tolist() == [0, 0]
    assert log_prob.grad is not None
    assert not log_prob.grad.any(), "every head stays in the graph, with a gradient of 0"


def test_clipped_value_loss_is_the_larger_of_both() -> None:
    values, old = torch.tensor([0.0, 3.0, 0.3]), torch.zeros(3)
    returns, valid = torch.tensor([1.0, 3.0, 1.0]), torch.ones(3, dtype=torch.bool)
    losses = [
        value_loss(values[i : i + 1], old[:1], returns[i : i + 1], valid[:1], kind="clipped", bound=0.5).item()
        for i in range(3)
    ]
    assert losses == pytest.approx([0.5, 0.5 * 2.5**2, 0.5 * 0.49])


def test_huber_is_linear_beyond_its_bound_and_squared_is_not() -> None:
    values, returns, valid = torch.zeros(2), torch.tensor([0.5, 10.0]), torch.ones(2, dtype=torch.bool)
    assert value_loss(values, values, returns, valid, kind="huber", bound=1.0).item() == pytest.approx(0.125 + 9.5)
    assert value_loss(values, values, returns, valid, kind="squared", bound=1.0).item() == pytest.approx(0.125 + 50)


def test_invalid_steps_have_no_value_loss_even_if_non_finite() -> None:
    values = torch.tensor([1.0, torch.nan], requires_grad=True)
    valid = torch.tensor([True, False])
    for kind in ("huber", "clipped", "squared"):
        assert value_loss(values, torch.zeros(2), torch.zeros(2), valid, kind=kind, bound=1.0).isfinite()


def test_advantages_that_hardly_differ_are_not_amplified() -> None:
    advantages = torch.tensor([1e-6, -1e-6])
    scaled = normalise(advantages, torch.tensor(0.0), torch.tensor(1e-6), min_std=1e-3)
    assert scaled.abs().max() == pytest.approx(1e-3)


EPISODES, STEPS = 16, 6
VALID = torch.ones(EPISODES, STEPS, dtype=torch.bool)
ONE_TASK = torch.zeros(EPISODES, dtype=torch.int64)


def make_returns() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns of the rest of each episode, and the reward collected before each step; later steps have less left."""
    generator = torch.Generator().manual_seed(0)
    reward = 5 + torch.randn(EPISODES, STEPS, generator=generator)
    collected = reward.cumsum(1)
    return collected[:, -1:] - collected + reward, collected - reward


@pytest.mark.parametrize(
    "predict",
    [
        lambda returns, known: torch.full_like(returns, 7.0),
        lambda returns, known: 7.0 - known,  # a constant prediction of the whole return
        lambda returns, known: known + 7.0,
        lambda returns, known: returns.mean(0, keepdim=True).expand_as(returns),  # what the step alone predicts
    ],
)
def test_a_critic_that_knows_nothing_new_explains_no_variance(predict: Any) -> None:
    returns, known = make_returns()
    found = explained_variance(predict(returns, known), returns, known, VALID, ONE_TASK)
    assert found.item() == pytest.approx(0, abs=1e-5)


def test_explained_variance_is_1_for_perfect_values_and_negative_for_wrong_ones() -> None:
    returns, known = make_returns()
    assert explained_variance(returns, returns, known, VALID, ONE_TASK) == 1
    assert explained_variance(returns + 5, returns, known, VALID, ONE_TASK).item() == pytest.approx(1)
    assert explained_variance(-returns, returns, known, VALID, ONE_TASK).item() == pytest.approx(-3, abs=1e-4)
    half = explained_variance(returns / 2, returns, known, VALID, ONE_TASK)
    assert half.item() == pytest.approx(0.75, abs=1e-4)


def test_explained_variance_is_not_measured_where_nothing_varies() -> None:
    returns, known = torch.ones(EPISODES, STEPS), torch.zeros(EPISODES, STEPS)
    assert explained_variance(returns, returns, known, VALID, ONE_TASK).isnan()


def test_the_differences_between_tasks_are_not_to_be_explained() -> None:
    returns, known = make_returns()
    tasks = torch.arange(EPISODES) % 2
    shifted = returns + 100 * tasks.unsqueeze(1)
    by_task = 100.0 * tasks.unsqueeze(1).expand_as(returns)
    assert explained_variance(by_task, shifted, known, VALID, tasks).item() == pytest.approx(0, abs=1e-5)
    assert explained_variance(by_task, shifted, known, VALID, ONE_TASK).item() > 0.9
    assert explained_variance(shifted, shifted, known, VALID, tasks) == 1


def test_explained_variance_leaves_out_steps_after_the_end() -> None:
    returns, known = make_returns()
    valid = VALID.clone()
    valid[3:, 4:] = False
    values = torch.where(valid, returns, torch.nan)
    assert explained_variance(values, torch.where(valid, returns, 1e9), known, valid, ONE_TASK) == 1


def test_annealing_is_linear_and_then_constant() -> None:
    assert [anneal(1.0, 0.0, 4, done) for done in (0, 1, 4, 9)] == [1.0, 0.75, 0.0, 0.0]
    assert anneal(1.0, None, 4, 9) == 1.0


def test_losses_run_on_the_meta_device() -> None:
    log_prob, flags = torch.zeros(4, 2, device="meta"), torch.zeros(4, 2, dtype=torch.bool, device="meta")
    part = surrogate(log_prob, log_prob, log_prob, log_prob[:, 0], flags, clip=0.2)
    masked_mean(part.loss, flags.sum(0))
    value_loss(log_prob, log_prob, log_prob, flags, kind="clipped", bound=1.0)
