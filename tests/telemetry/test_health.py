import math
from typing import Any

import pytest
import torch

from esper.ppo import Rollout
from esper.telemetry.health import MOST_LISTED, RatioDiagnostic, lstm_health, memory_metrics, reevaluate
from tests.controllers.fixtures_policies import draws, layout, policy
from tests.ppo.fixtures_environments import Locks, learner, played


def test_no_memory_has_no_health_and_broken_memory_shows() -> None:
    assert lstm_health(None) == {}
    assert lstm_health(policy(layers=0).begin(3)) == {}
    state = torch.full((1, 2, 4), 3.0)
    found = lstm_health((state, -state))
    assert found["health/lstm_rms"].item() == pytest.approx(3)
    assert found["health/lstm_max"].item() == pytest.approx(3)
    state[0, 0, 0] = torch.nan
    assert math.isnan(lstm_health((state, state))["health/lstm_rms"].item())


def test_health_of_the_memory_is_one_transfer_from_the_device() -> None:
    """On the meta device any look at a value would raise."""
    state = torch.zeros(1, 2, 4, device="meta")
    assert all(figure.device.type == "meta" for figure in lstm_health((state, state)).values())


def test_a_second_look_changes_nothing_and_sees_the_acting_policys_log_probs() -> None:
    world = Locks()
    module = learner(world)
    rollout = played(module, world)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    log_prob, state = reevaluate(module, rollout)
    valid = rollout.valid
    torch.testing.assert_close(log_prob[valid], rollout.log_prob[valid], atol=1e-6, rtol=0)
    assert state[0].shape == (1, 4, 16)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_a_second_look_at_a_short_episode_ends_where_it_ended() -> None:
    world = Locks()
    module = learner(world)
    rollout = played(module, world)
    _, state = reevaluate(module, rollout)
    short = [part[1:2, :4] for part in (rollout.base, rollout.slots, rollout.blueprints)]
    with torch.no_grad():
        alone = module.policy(*short, module.policy.begin(1)).state
    torch.testing.assert_close(state[0][:, 1], alone[0][:, 0])


def rollout_of(envs: int = 40, steps: int = 5) -> Rollout:
    of = layout()
    return Rollout.empty(list(range(envs)), steps, of, policy(of).begin(envs))


def diagnose(log_prob: torch.Tensor, rollout: Rollout, active: torch.Tensor) -> Any:
    return RatioDiagnostic.of(log_prob, rollout, active, low=0.1, high=5.0)


def test_ratios_are_counted_and_the_worst_are_listed_up_to_a_bound() -> None:
    rollout = rollout_of()
    log_prob = torch.zeros_like(rollout.log_prob)
    active = torch.ones_like(log_prob, dtype=torch.bool)
    log_prob[:, :, 0] = math.log(6.0)
    log_prob[0, 0, 1], log_prob[0, 1, 1] = math.log(0.05), torch.inf
    found = diagnose(log_prob, rollout, active)
    assert (found.above, found.below, found.not_finite) == (200, 1, 1)
    assert found.largest == pytest.approx(6)
    assert found.smallest == pytest.approx(0.05)
    assert len(found.listed) == MOST_LISTED == 100
    assert found.listed[0] == {"episode": 0, "step": 0, "head": "op", "option": "WAIT", "ratio": pytest.approx(6)}
    assert found.listed[3]["ratio"] is None


def test_heads_that_took_no_part_are_no_offence() -> None:
    rollout = rollout_of(2)
    log_prob = 50 * torch.rand(rollout.log_prob.shape, generator=draws())
    found = diagnose(log_prob, rollout, torch.zeros_like(log_prob, dtype=torch.bool))
    assert (found.above, found.below, found.not_finite, found.listed) == (0, 0, 0, [])
    assert found.largest == found.smallest == 1


def test_memory_is_that_of_the_process() -> None:
    found = memory_metrics(torch.device("cpu"))
    assert 0.05 < found["health/memory_gb"] < 100
