import pytest
import torch

from esper.controllers import PolicyController
from esper.ppo import PADDING_OPTION, Rollout
from tests.controllers.fixtures_policies import draws, layout, policy, random_inputs
from tests.ppo.fixtures_environments import MatchingEnv, make_module, run_round


@pytest.mark.parametrize("slots", [3, 4, 5])
@pytest.mark.parametrize("actions", ["core", "full", "lean"])
def test_unused_steps_have_exactly_the_padding_option_legal(actions: str, slots: int) -> None:
    of = layout(actions, slots)
    rollout = Rollout.empty([0, 1], 3, of, policy(of).begin(2))
    for mask in (rollout.masks.op, rollout.masks.slot, *rollout.masks.others.values()):
        assert mask[..., PADDING_OPTION].all()
        assert mask.sum(-1).eq(1).all()
    assert not rollout.valid.any()


def test_only_episodes_that_are_alive_are_written() -> None:
    of = layout()
    net = policy(of)
    rollout = Rollout.empty([0, 1], 2, of, net.begin(2))
    inputs, controller = random_inputs(of, 2, draws()), PolicyController(net, greedy=False)
    decision, _ = controller.decide(inputs, controller.begin([0, 1]))
    rollout.write_decision(0, decision, torch.tensor([True, False]))
    rollout.write_result(0, torch.ones(2), torch.tensor([True, True]), torch.zeros(2, dtype=torch.bool))
    assert torch.equal(rollout.raw_base[0, 0], inputs.base[0])
    assert not rollout.raw_base[1].any()
    assert rollout.valid.tolist() == [[True, False], [False, False]]
    assert rollout.reward[:, 0].tolist() == [1, 0]
    assert rollout.terminated[:, 0].tolist() == [True, False]


def test_a_step_beyond_the_allocated_steps_is_refused() -> None:
    of = layout()
    net = policy(of)
    rollout = Rollout.empty([0], 1, of, net.begin(1))
    inputs, controller = random_inputs(of, 1, draws()), PolicyController(net, greedy=True)
    decision, _ = controller.decide(inputs, controller.begin([0]))
    with pytest.raises(ValueError, match=r"rollout: step=1: must be below 1"):
        rollout.write_decision(1, decision, torch.ones(1, dtype=torch.bool))


def test_an_initial_state_for_another_number_of_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="of 3 episodes, but episode_seeds has 2"):
        Rollout.empty([0, 1], 2, layout(), policy().begin(3))


def test_only_the_initial_state_is_stored() -> None:
    env = MatchingEnv()
    rollout = run_round(make_module(env), env)
    assert all(part.shape == (1, env.envs, 16) and not part.any() for part in rollout.state)


def test_moving_to_the_same_device_copies_nothing() -> None:
    rollout = Rollout.empty([0], 1, layout(), policy().begin(1))
    assert rollout.to(torch.device("cpu")) is rollout
    moved = rollout.to(torch.device("meta"))
    assert {moved.value.device.type, moved.masks.op.device.type, moved.state[0].device.type} == {"meta"}
