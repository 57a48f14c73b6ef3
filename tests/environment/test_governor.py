import math

import pytest
import torch

from esper.config import load_preset
from esper.environment import Environment, Governor, GrowthStep, RollbackReason
from esper.growth import Snapshot
from esper.lifecycle import Stage
from tests.fixtures_environment import environment
from tests.lifecycle.fixtures_slots import act

CHANCE = math.log(10)


def governor(**changes: object) -> Governor:
    return load_preset("governor/default", envs=1, chance=CHANCE, **changes)


def judge(*losses: float, **changes: object) -> list[RollbackReason]:
    tested = governor(**changes)
    return [RollbackReason(int(tested.judge(torch.tensor([loss])))) for loss in losses]


def test_a_healthy_run_is_not_rolled_back() -> None:
    assert set(judge(2.3, 2.1, 1.8, 1.9, 1.7, 2.0, 1.5, 1.4, 1.6, 1.3)) == {RollbackReason.NONE}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_one_non_finite_loss_causes_a_rollback(loss: float) -> None:
    assert judge(2.3, loss, 2.2) == [RollbackReason.NONE, RollbackReason.NON_FINITE, RollbackReason.NONE]


def test_a_host_that_had_learned_and_is_back_at_chance_has_collapsed() -> None:
    assert judge(1.2, 1.1, 1.0, CHANCE)[-1] is RollbackReason.COLLAPSED
    assert judge(2.2, 2.1, 2.0, CHANCE)[-1] is RollbackReason.NONE  # it had not learned much


def test_divergence_needs_consecutive_losses_that_stay_out_of_the_history() -> None:
    assert judge(1.5, 1.4, 1.3, 9.0, 1.2, 9.0, 9.0) == [RollbackReason.NONE] * 6 + [RollbackReason.DIVERGING]
    assert RollbackReason.DIVERGING not in judge(9.0, 9.5, 9.0, 9.5)  # it was never better


def test_environments_are_judged_independently() -> None:
    tested = load_preset("governor/default", envs=2, chance=CHANCE)
    assert tested.judge(torch.tensor([math.nan, 1.0])).tolist() == [RollbackReason.NON_FINITE, RollbackReason.NONE]


WAIT = {"op": "WAIT"}
GERMINATE = {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}


def set_weights_to_nan(env: Environment, index: int) -> None:
    with torch.no_grad():
        for parameter in env.model(index).host.parameters():
            parameter.fill_(torch.nan)


def snapshots(env: Environment) -> list[Snapshot]:
    saved = [env.host_run(index).saved for index in range(2)]
    return [each for each in saved if each is not None]


def run_to(env: Environment, script: dict[int, dict[str, str]], steps: int) -> list[GrowthStep]:
    env.reset([1, 2])
    return [env.step(act(env.space, script.get(t, WAIT), script.get(t, WAIT))) for t in range(steps)]


def test_a_non_finite_host_is_restored_and_the_penalty_is_part_of_that_steps_reward() -> None:
    env = environment()
    run_to(env, {0: GERMINATE}, 3)
    set_weights_to_nan(env, 0)
    step = env.step(act(env.space, WAIT, WAIT))
    assert step.record.rollback.tolist() == [RollbackReason.NON_FINITE, RollbackReason.NONE]
    assert step.rewarded.parts["rollback"].tolist() == [-10.0, 0.0]
    assert step.reward.isfinite().all()
    assert step.observation.base.isfinite().all()
    assert step.record.now.score.isfinite().all()
    assert all(parameter.isfinite().all() for parameter in env.model(0).parameters())
    assert step.record.entered[0, 1, Stage.PRUNED]
    assert not step.record.entered[1, 1, Stage.PRUNED]
    assert list(env.model(0).seeds) == []
    assert list(env.model(1).seeds) == ["block2"]
    assert not env.host_run(0).optimizer.torch.state
    following = env.step(act(env.space, WAIT, WAIT))  # the episode continues
    assert following.record.rollback.tolist() == [0, 0]
    assert following.rewarded.parts["rollback"].tolist() == [0.0, 0.0]


def test_a_rollback_restores_fossils_even_those_of_the_same_step() -> None:
    for steps_before in (7, 6):
        env = environment()
        run_to(env, {0: GERMINATE, 6: {"op": "FOSSILIZE", "slot": "block2"}}, steps_before)
        action = {7: WAIT, 6: {"op": "FOSSILIZE", "slot": "block2"}}[steps_before]
        original = env.host_run(0)._train

        def train_then_fail(*arguments, original=original, env=env):  # type: ignore[no-untyped-def]
            result = original(*arguments)
            set_weights_to_nan(env, 0)
            return result

        env.host_run(0)._train = train_then_fail  # type: ignore[method-assign]
        step = env.step(act(env.space, action, action))
        assert step.record.rollback.tolist() == [RollbackReason.NON_FINITE, 0]
        assert list(env.model(0).seeds) == ["block2"]
        assert step.record.after.stage[0, 1] == Stage.FOSSILIZED
        assert all(parameter.isfinite().all() for parameter in env.model(0).parameters())


def test_a_huge_learning_rate_causes_a_rollback() -> None:
    env = environment("optimizer.build.lr=1e12", "optimizer.clip=null", "optimizer.schedule.warmup=0.0")
    steps = run_to(env, {}, 5)
    assert any(step.record.rollback.any() for step in steps)
    for step in steps:
        assert step.reward.isfinite().all()
        assert torch.equal(step.rewarded.parts["rollback"], -10.0 * (step.record.rollback > 0))


def test_only_healthy_hosts_are_saved_and_each_has_one_snapshot() -> None:
    env = environment("governor.snapshot_every=1")
    run_to(env, {}, 2)
    earlier = snapshots(env)
    set_weights_to_nan(env, 0)
    env.step(act(env.space, WAIT, WAIT))
    saved = snapshots(env)
    assert saved[0] is earlier[0]
    assert saved[1] is not earlier[1]
    assert all(value.isfinite().all() and value.device.type == "cpu" for value in saved[0].weights.values())


def test_a_rollback_resets_the_loss_history() -> None:
    """A host that is restored to its start is near chance again; this is not a collapse."""
    env = environment()
    run_to(env, {}, 3)
    env._current.governor._losses[:] = 0.5  # as if it had learned well
    set_weights_to_nan(env, 0)
    reasons = [env.step(act(env.space, WAIT, WAIT)).record.rollback[0].item() for _ in range(5)]
    assert reasons == [RollbackReason.NON_FINITE, 0, 0, 0, 0]


def test_a_fossil_of_an_unhealthy_host_is_saved_without_the_host() -> None:
    env = environment()
    run_to(env, {0: GERMINATE}, 6)
    good = snapshots(env)[0]
    env._current.governor._strikes[0] = 1
    with torch.no_grad():
        env.model(0).host.segments[-1][-1].bias += 200
    new = torch.tensor([[False, True, False], [False, False, False]])
    env._current._changes.save_fossils(new, env._current.governor.is_healthy(), env._slots)
    saved = snapshots(env)[0]
    assert saved.seeds == {**good.seeds, "block2": ("conv_light", 0)}
    bias = next(name for name in good.weights if name.startswith("host.segments.3") and name.endswith("bias"))
    assert torch.equal(saved.weights[bias], good.weights[bias])
    assert "seeds.block2.body.branch.0.weight" in saved.weights
    env.host_run(0).roll_back()
    assert list(env.model(0).seeds) == ["block2"]


def test_in_the_last_step_only_a_non_finite_host_is_rolled_back() -> None:
    env = environment()
    run_to(env, {}, 9)
    env._current.governor._losses[:] = 0.5  # with committed seeds only, a host may be near chance again
    set_weights_to_nan(env, 1)
    step = env.step(act(env.space, WAIT, WAIT))
    assert step.record.rollback.tolist() == [RollbackReason.NONE, RollbackReason.NON_FINITE]


@pytest.mark.parametrize("key", ["history", "min_history", "patience", "snapshot_every"])
def test_an_invalid_governor_setting_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"governor.{key}=0: must be at least 1"):
        governor(**{key: 0})
