import math
from typing import Any

import pytest
import torch

from esper.ppo import Rollout
from esper.telemetry.health import MAX_LISTED, RatioDiagnostic, lstm_health, memory_metrics, reevaluate
from tests.controllers.fixtures_policies import draws, layout, policy
from tests.ppo.fixtures_environments import MatchingEnv, make_module, run_round


def test_lstm_health_is_empty_without_an_lstm_and_nan_for_nan() -> None:
    assert lstm_health(None) == {}
    assert lstm_health(policy(layers=0).begin(3)) == {}
    state = torch.full((1, 2, 4), 3.0)
    metrics = lstm_health((state, -state))
    assert metrics["health/lstm_rms"].item() == pytest.approx(3)
    assert metrics["health/lstm_max"].item() == pytest.approx(3)
    state[0, 0, 0] = torch.nan
    assert math.isnan(lstm_health((state, state))["health/lstm_rms"].item())


def test_lstm_health_does_not_synchronise_the_device() -> None:
    """On the meta device reading a value raises."""
    state = torch.zeros(1, 2, 4, device="meta")
    assert all(metric.device.type == "meta" for metric in lstm_health((state, state)).values())


def test_reevaluate_gives_the_log_probs_of_the_acting_policy_and_changes_nothing() -> None:
    env = MatchingEnv()
    module = make_module(env)
    rollout = run_round(module, env)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    log_prob, state = reevaluate(module, rollout)
    valid = rollout.valid
    torch.testing.assert_close(log_prob[valid], rollout.log_prob[valid], atol=1e-6, rtol=0)
    assert state[0].shape == (1, 4, 16)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_reevaluate_gives_the_state_at_the_end_of_a_short_episode() -> None:
    env = MatchingEnv()
    module = make_module(env)
    rollout = run_round(module, env)
    _, state = reevaluate(module, rollout)
    short = [part[1:2, :4] for part in (rollout.base, rollout.slots, rollout.blueprints)]
    with torch.no_grad():
        separate = module.policy(*short, module.policy.begin(1), rollout.context[torch.tensor([1])]).state
    torch.testing.assert_close(state[0][:, 1], separate[0][:, 0])


def make_rollout(envs: int = 40, steps: int = 5) -> Rollout:
    of = layout()
    return Rollout.empty(list(range(envs)), steps, of, policy(of).begin(envs))


def diagnose(log_prob: torch.Tensor, rollout: Rollout, active: torch.Tensor) -> Any:
    return RatioDiagnostic.of(log_prob, rollout, active, low=0.1, high=5.0)


def test_ratios_outside_bounds_are_counted_and_listed_up_to_a_maximum() -> None:
    rollout = make_rollout()
    log_prob = torch.zeros_like(rollout.log_prob)
    active = torch.ones_like(log_prob, dtype=torch.bool)
    log_prob[:, :, 0] = math.log(6.0)
    log_prob[0, 0, 1], log_prob[0, 1, 1] = math.log(0.05), torch.inf
    diagnostic = diagnose(log_prob, rollout, active)
    assert (diagnostic.above, diagnostic.below, diagnostic.not_finite) == (200, 1, 1)
    assert diagnostic.largest == pytest.approx(6)
    assert diagnostic.smallest == pytest.approx(0.05)
    assert len(diagnostic.listed) == MAX_LISTED == 100
    assert diagnostic.listed[0] == {"episode": 0, "step": 0, "head": "op", "option": "WAIT", "ratio": pytest.approx(6)}
    assert diagnostic.listed[3]["ratio"] is None


def test_heads_that_are_not_active_are_not_counted() -> None:
    rollout = make_rollout(2)
    log_prob = 50 * torch.rand(rollout.log_prob.shape, generator=draws())
    diagnostic = diagnose(log_prob, rollout, torch.zeros_like(log_prob, dtype=torch.bool))
    assert (diagnostic.above, diagnostic.below, diagnostic.not_finite, diagnostic.listed) == (0, 0, 0, [])
    assert diagnostic.largest == diagnostic.smallest == 1


def test_memory_is_the_peak_of_the_process() -> None:
    metrics = memory_metrics(torch.device("cpu"))
    assert 0.05 < metrics["health/memory_gb"] < 100
