import math

import pytest
import torch

from esper.config import load_preset
from esper.environment import Environment, Governor, GrowthStep, RollbackReason
from esper.lifecycle import Stage
from tests.fixtures_environment import environment
from tests.lifecycle.fixtures_slots import act

CHANCE = math.log(10)


def governor(**changes: object) -> Governor:
    return load_preset("governor/default", envs=1, chance=CHANCE, **changes)


def judged(*losses: float, **changes: object) -> list[RollbackReason]:
    judge = governor(**changes)
    return [RollbackReason(int(judge.judge(torch.tensor([loss])))) for loss in losses]


def test_a_healthy_run_is_left_alone() -> None:
    assert set(judged(2.3, 2.1, 1.8, 1.9, 1.7, 2.0, 1.5, 1.4, 1.6, 1.3)) == {RollbackReason.NONE}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_enough(loss: float) -> None:
    assert judged(2.3, loss, 2.2) == [RollbackReason.NONE, RollbackReason.NON_FINITE, RollbackReason.NONE]


def test_a_host_that_had_learned_and_answers_at_chance_has_collapsed() -> None:
    assert judged(1.2, 1.1, 1.0, CHANCE)[-1] is RollbackReason.COLLAPSED
    assert judged(2.2, 2.1, 2.0, CHANCE)[-1] is RollbackReason.NONE  # it had not learned much


def test_divergence_needs_patience_and_does_not_spoil_the_memory() -> None:
    assert judged(1.5, 1.4, 1.3, 9.0, 1.2, 9.0, 9.0) == [RollbackReason.NONE] * 6 + [RollbackReason.DIVERGING]
    assert RollbackReason.DIVERGING not in judged(9.0, 9.5, 9.0, 9.5)  # it never was better


def test_environments_are_judged_apart() -> None:
    judge = load_preset("governor/default", envs=2, chance=CHANCE)
    assert judge.judge(torch.tensor([math.nan, 1.0])).tolist() == [RollbackReason.NON_FINITE, RollbackReason.NONE]


WAIT = {"op": "WAIT"}
GERMINATE = {"op": "GERMINATE", "slot": "block2", "blueprint": "conv_light"}


def poison(env: Environment, index: int) -> None:
    with torch.no_grad():
        for parameter in env.model(index).host.parameters():
            parameter.fill_(torch.nan)


def run_to(env: Environment, script: dict[int, dict[str, str]], steps: int) -> list[GrowthStep]:
    env.reset([1, 2])
    return [env.step(act(env.space, script.get(t, WAIT), script.get(t, WAIT))) for t in range(steps)]


def test_a_poisoned_host_is_restored_and_the_penalty_lands_on_that_very_step() -> None:
    env = environment()
    run_to(env, {0: GERMINATE}, 3)
    poison(env, 0)
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
    assert not env._runs[0].optimizer.torch.state
    following = env.step(act(env.space, WAIT, WAIT))  # the episode goes on
    assert following.record.rollback.tolist() == [0, 0]
    assert following.rewarded.parts["rollback"].tolist() == [0.0, 0.0]


def test_a_rollback_keeps_fossils_even_those_of_the_same_step() -> None:
    for steps_before in (7, 6):
        env = environment()
        run_to(env, {0: GERMINATE, 6: {"op": "FOSSILIZE", "slot": "block2"}}, steps_before)
        poison_after = {7: WAIT, 6: {"op": "FOSSILIZE", "slot": "block2"}}[steps_before]
        original = env._runs[0]._train

        def spoiled(*arguments, original=original, env=env):  # type: ignore[no-untyped-def]
            result = original(*arguments)
            poison(env, 0)
            return result

        env._runs[0]._train = spoiled  # type: ignore[method-assign]
        step = env.step(act(env.space, poison_after, poison_after))
        assert step.record.rollback.tolist() == [RollbackReason.NON_FINITE, 0]
        assert list(env.model(0).seeds) == ["block2"]
        assert step.record.after.stage[0, 1] == Stage.FOSSILIZED
        assert all(parameter.isfinite().all() for parameter in env.model(0).parameters())


def test_an_exploding_learning_rate_is_caught() -> None:
    env = environment("optimizer.build.lr=1e12", "optimizer.clip=null", "optimizer.schedule.warmup=0.0")
    steps = run_to(env, {}, 5)
    assert any(step.record.rollback.any() for step in steps)
    for step in steps:
        assert step.reward.isfinite().all()
        assert torch.equal(step.rewarded.parts["rollback"], -10.0 * (step.record.rollback > 0))


def test_snapshots_are_taken_only_of_sound_hosts_and_one_is_kept() -> None:
    env = environment("governor.snapshot_every=1")
    run_to(env, {}, 2)
    saved = list(env._snapshots.saved)
    poison(env, 0)
    env.step(act(env.space, WAIT, WAIT))
    assert env._snapshots.saved[0] is saved[0]
    assert env._snapshots.saved[1] is not saved[1]
    assert len(env._snapshots.saved) == 2
    assert all(
        value.isfinite().all() and value.device.type == "cpu" for value in env._snapshots.saved[0].weights.values()
    )


def test_after_a_rollback_the_past_is_forgotten() -> None:
    """A host that is back at its beginning is near chance again; that is no second collapse."""
    env = environment()
    run_to(env, {}, 3)
    env._governor._losses[:] = 0.5  # as if it had learned well
    poison(env, 0)
    reasons = [env.step(act(env.space, WAIT, WAIT)).record.rollback[0].item() for _ in range(5)]
    assert reasons == [RollbackReason.NON_FINITE, 0, 0, 0, 0]


def test_a_fossil_of_an_unsound_host_is_saved_without_the_host() -> None:
    env = environment()
    run_to(env, {0: GERMINATE}, 6)
    good = env._snapshots.saved[0]
    env._governor._strikes[0] = 1
    with torch.no_grad():
        env.model(0).host.segments[-1][-1].bias += 200
    new = torch.tensor([[False, True, False], [False, False, False]])
    env._snapshots.save_fossils(new, env._governor.healthy(), env._slots)
    saved = env._snapshots.saved[0]
    assert saved.episode_seeds == {**good.episode_seeds, "block2": ("conv_light", 0)}
    bias = next(name for name in good.weights if name.startswith("host.segments.3") and name.endswith("bias"))
    assert torch.equal(saved.weights[bias], good.weights[bias])
    assert "seeds.block2.body.branch.0.weight" in saved.weights
    env._runs[0].restore(saved)
    assert list(env.model(0).seeds) == ["block2"]


def test_at_the_end_only_a_host_that_is_not_finite_is_rolled_back() -> None:
    env = environment()
    run_to(env, {}, 9)
    env._governor._losses[:] = 0.5  # the committed host may well be near chance after this
    poison(env, 1)
    step = env.step(act(env.space, WAIT, WAIT))
    assert step.record.rollback.tolist() == [RollbackReason.NONE, RollbackReason.NON_FINITE]


@pytest.mark.parametrize("key", ["history", "least", "patience", "snapshot_every"])
def test_an_impossible_governor_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"governor.{key}=0: must be at least 1"):
        governor(**{key: 0})
