import pytest
import torch

from esper.controllers import NoGrowth
from esper.environment import Environment, EpisodeStart, GrowthStep
from esper.lifecycle import Stage
from tests.fixtures_environment import environment

FOSSILS = {"block1": ("conv_light", "ADD"), "block3": ("norm", "GATED")}


def played(env: Environment, seeds: list[int], starts: list[EpisodeStart]) -> list[GrowthStep]:
    observation, controller = env.reset(seeds, starts), NoGrowth(env.space)
    steps = []
    for _ in range(env.steps):
        steps.append(env.step(controller.act(observation, None)[0]))
        observation = steps[-1].observation
    return steps


def test_planted_seeds_take_part_and_are_counted_from_the_first_step() -> None:
    env = environment("environment.steps=2")
    bare, grown = 6_418, parameters_with_fossils(env)
    first, last = played(env, [5, 5], [EpisodeStart(), EpisodeStart(fossils=FOSSILS)])
    for step in (first, last):
        assert step.record.now.parameters.tolist() == [bare, grown]
        assert step.record.during.stage[1].tolist() == [Stage.FOSSILIZED, Stage.DORMANT, Stage.FOSSILIZED]
        assert step.record.host_parameters.tolist() == [bare, bare]
    assert first.record.now.flops[1] > first.record.now.flops[0]
    assert first.record.now.loss[0] != first.record.now.loss[1]


def parameters_with_fossils(env: Environment) -> int:
    env.reset([0], [EpisodeStart(fossils=FOSSILS)])
    model = env.model(0)
    return sum(parameter.numel() for parameter in model.parameters())


def test_planted_seeds_are_the_identity_at_birth() -> None:
    env = environment()
    env.reset([5, 5], [EpisodeStart(), EpisodeStart(fossils=FOSSILS)])
    assert env.view.now.loss[0] == env.view.now.loss[1]


def test_an_episode_with_fewer_seeds_than_environments_is_the_same_episode() -> None:
    env = environment("environment.steps=2")
    both, alone = played(env, [5, 6], [EpisodeStart(), EpisodeStart()]), played(env, [6], [EpisodeStart()])
    assert [step.record.now.loss[1] for step in both] == [step.record.now.loss[0] for step in alone]
    with pytest.raises(ValueError, match=r"seeds: 3 were given for environment\.envs=2"):
        env.reset([1, 2, 3])


@pytest.mark.parametrize("batches", [1, 7, 20, 203])
def test_a_budget_of_batches_is_spread_over_the_steps_without_loss(batches: int) -> None:
    shares = [EpisodeStart(batches=batches).batches_in_step(step, 10, 2) for step in range(10)]
    assert sum(shares) == batches
    assert max(shares) - min(shares) <= 1


def test_a_host_trains_on_its_own_budget_and_pays_for_it() -> None:
    env = environment("environment.steps=2")
    steps = played(env, [5, 5], [EpisodeStart(batches=4), EpisodeStart(batches=13)])
    usual = played(env, [5, 5], [EpisodeStart(), EpisodeStart()])
    assert steps[-1].record.now.loss[0] == usual[-1].record.now.loss[0]  # two batches a step are the usual ones
    spent = steps[-1].record.now.flops
    assert spent[1] > spent[0]
    assert torch.isfinite(steps[-1].record.now.loss).all()


def test_a_start_tells_only_what_is_unusual() -> None:
    assert EpisodeStart().to_dict() == {}
    assert EpisodeStart(fossils=FOSSILS, batches=3).to_dict() == {"fossils": FOSSILS, "batches": 3}


def test_a_step_without_batches_is_measured_all_the_same() -> None:
    env = environment("environment.steps=2")
    steps = played(env, [5], [EpisodeStart(batches=1)])
    assert steps[0].record.now.train_loss.isnan().all()
    assert steps[1].record.now.train_loss.isfinite().all()


def test_what_cannot_be_planted_is_refused() -> None:
    env = environment()
    with pytest.raises(ValueError, match="lora in block1, blended by ADD, does not exist in this space"):
        env.reset([1], [EpisodeStart(fossils={"block1": ("lora", "ADD")})])
