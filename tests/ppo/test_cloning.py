import pytest
import torch

from esper.config import build_vector_env, compose_config
from esper.controllers import Policy, ScheduleController, ScheduleEntry
from esper.environment import Oracle
from esper.ppo import PPO, Rollout
from esper.ppo.cloning import clone_actions, fold_observations, run_controller
from esper.telemetry.health import reevaluate
from esper.training import build_module
from tests.controllers.fixtures_policies import policy
from tests.ppo.fixtures_environments import make_collector

SETTINGS = {"minibatch": 8, "lr": 1e-2, "grad_clip": 0.5, "rng_seed": 0}


def make_oracle(*overrides: str) -> tuple[Oracle, PPO]:
    config = compose_config("run", ["+experiment=oracle", *overrides])
    env = build_vector_env(config)
    return env, build_module(config, env)


def record(env: Oracle, net: Policy, blueprint: str = "conv_heavy", first: int = 0) -> Rollout:
    slots = list(reversed(env.space.slots))
    entries = [ScheduleEntry(step, slot, [blueprint]) for step, slot in enumerate(slots)]
    controller = ScheduleController(env.space, entries)
    return run_controller(env, controller, net, range(first, first + env.envs))


def test_a_policy_that_clones_the_best_plan_scores_like_it() -> None:
    env, module = make_oracle()
    rollout = record(env, module.policy)
    assert rollout.outcome["score"].mean().item() == pytest.approx(env.optimum(), abs=0.5)
    fold_observations(module.policy, [rollout])
    weights = [torch.ones(env.envs)]
    losses = clone_actions(module.policy, [rollout], weights, passes=40, **SETTINGS)
    assert losses[0] > 0.5
    assert losses[-1] < 0.05
    greedy = make_collector(module, env).run_episodes("greedy", list(range(100, 100 + env.envs)))
    assert greedy.outcome["score"].mean().item() > env.optimum() - 1


def test_observations_are_folded_before_they_are_normalised() -> None:
    env, module = make_oracle("environment.envs=4")
    rollouts = [record(env, module.policy), record(env, module.policy, "norm", first=10)]
    fold_observations(module.policy, rollouts)
    assert module.policy.base_statistics.count == sum(rollout.decisions for rollout in rollouts)
    columns = len(env.layout.base)
    base = torch.cat([rollout.base[..., :columns].flatten(0, 1) for rollout in rollouts])
    assert base.mean(0).abs().max() < 0.3, "missing groups are 0, so means are near 0"
    assert base.abs().max() <= 5


def test_episodes_count_by_their_weight_and_those_with_weight_0_not_at_all() -> None:
    env, module = make_oracle("environment.envs=4")
    rollouts = [record(env, module.policy), record(env, module.policy, "norm", first=10)]
    fold_observations(module.policy, rollouts)
    weights = [torch.ones(4), torch.zeros(4)]
    clone_actions(module.policy, rollouts, weights, passes=30, **SETTINGS)
    probabilities = []
    for rollout in rollouts:
        again = clone_actions(module.policy, [rollout], [torch.ones(4)], passes=1, **{**SETTINGS, "lr": 1e-9})
        probabilities.append(again[0])
    assert probabilities[0] < 0.2 < 1 < probabilities[1]


def test_the_loss_is_of_active_heads_and_of_steps_with_a_choice() -> None:
    env, module = make_oracle("environment.envs=4")
    rollout = record(env, module.policy)
    fold_observations(module.policy, [rollout])
    with torch.no_grad():
        log_prob, _ = reevaluate(module, rollout)
    op, slot = rollout.select_head("op"), rollout.masks.slot
    has_choice = rollout.masks.op.sum(-1) >= 2
    assert not has_choice.all()
    several_slots = slot.gather(2, op[..., None, None].expand(-1, -1, 1, slot.shape[-1])).sum((-2, -1)) >= 2
    germinates = op == env.layout.ops.index("GERMINATE")
    is_active = torch.stack([has_choice, several_slots, germinates, germinates], -1)
    expected = -(log_prob * is_active).sum() / has_choice.sum()
    loss = clone_actions(module.policy, [rollout], [torch.ones(4)], passes=1, **SETTINGS)
    assert loss == pytest.approx([expected.item()], rel=1e-4)


def policy_copy(net: Policy) -> Policy:
    copied = policy(net.layout, hidden=net.sizes["hidden"])
    copied.load_state_dict(net.state_dict())
    return copied


def test_cloning_is_deterministic_and_leaves_the_critic_as_it_is() -> None:
    env, module = make_oracle("environment.envs=4")
    rollout = record(env, module.policy)
    fold_observations(module.policy, [rollout])
    copies = [policy_copy(module.policy) for _ in range(2)]
    losses = [clone_actions(each, [rollout], [torch.ones(4)], passes=2, **SETTINGS) for each in copies]
    assert losses[0] == losses[1]
    for name, value in copies[0].state_dict().items():
        assert torch.equal(value, copies[1].state_dict()[name])
        assert not name.startswith("critic.") or torch.equal(value, module.policy.state_dict()[name])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"passes": 0}, "passes=0: must be at least 1."),
        ({"weights": [torch.ones(3)]}, "weights: must have one number for each episode of each rollout."),
        ({"weights": [-torch.ones(4)]}, "weights: must be finite numbers of at least 0."),
        ({"weights": [torch.zeros(4)]}, "weights: must be above 0 for an episode with a decision."),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, object], sentence: str) -> None:
    env, module = make_oracle("environment.envs=4")
    arguments = {"weights": [torch.ones(4)], "passes": 1, **SETTINGS, **changes}
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        clone_actions(module.policy, [record(env, module.policy)], **arguments)  # type: ignore[arg-type]
