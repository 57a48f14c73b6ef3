import pytest
import torch

from esper.controllers import NoGrowth
from esper.environment import Environment, EpisodeStart, GrowthStep
from esper.lifecycle import Stage
from tests.fixtures_environment import environment

FOSSILS = {"block1": ("conv_light", "ADD"), "block3": ("norm", "GATED")}


def run(env: Environment, episode_seeds: list[int], starts: list[EpisodeStart]) -> list[GrowthStep]:
    observation, controller = env.reset(episode_seeds, starts), NoGrowth(env.space)
    steps = []
    for _ in range(env.steps):
        steps.append(env.step(controller.act(observation, None)[0]))
        observation = steps[-1].observation
    return steps


def test_initial_fossils_are_active_and_counted_from_the_first_step() -> None:
    env = environment("environment.steps=2")
    bare, grown = 6_418, parameters_with_fossils(env)
    first, last = run(env, [5, 5], [EpisodeStart(), EpisodeStart(fossils=FOSSILS)])
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


def test_initial_fossils_are_the_identity_before_training() -> None:
    env = environment()
    env.reset([5, 5], [EpisodeStart(), EpisodeStart(fossils=FOSSILS)])
    assert env.view.now.loss[0] == env.view.now.loss[1]


def test_an_episode_is_the_same_with_fewer_parallel_episodes() -> None:
    env = environment("environment.steps=2")
    pair, single = run(env, [5, 6], [EpisodeStart(), EpisodeStart()]), run(env, [6], [EpisodeStart()])
    assert [step.record.now.loss[1] for step in pair] == [step.record.now.loss[0] for step in single]
    with pytest.raises(ValueError, match=r"episode_seeds: 3 were given, must be .* environment\.envs=2"):
        env.reset([1, 2, 3])


@pytest.mark.parametrize("batches", [1, 7, 20, 203])
def test_a_number_of_batches_is_spread_evenly_over_the_steps(batches: int) -> None:
    shares = [EpisodeStart(batches=batches).batches_in_step(step, 10, 2) for step in range(10)]
    assert sum(shares) == batches
    assert max(shares) - min(shares) <= 1


def test_a_host_trains_on_its_own_number_of_batches_and_is_charged_for_it() -> None:
    env = environment("environment.steps=2")
    steps = run(env, [5, 5], [EpisodeStart(batches=4), EpisodeStart(batches=13)])
    default = run(env, [5, 5], [EpisodeStart(), EpisodeStart()])
    assert steps[-1].record.now.loss[0] == default[-1].record.now.loss[0]  # two batches in a step are the default
    flops = steps[-1].record.now.flops
    assert flops[1] > flops[0]
    assert torch.isfinite(steps[-1].record.now.loss).all()


def test_a_start_as_a_dict_has_only_fields_that_differ_from_the_default() -> None:
    assert EpisodeStart().to_dict() == {}
    assert EpisodeStart(fossils=FOSSILS, batches=3).to_dict() == {"fossils": FOSSILS, "batches": 3}


def test_a_step_without_batches_is_still_measured() -> None:
    env = environment("environment.steps=2")
    steps = run(env, [5], [EpisodeStart(batches=1)])
    assert steps[0].record.now.train_loss.isnan().all()
    assert steps[1].record.now.train_loss.isfinite().all()


def test_unknown_initial_fossils_are_refused() -> None:
    env = environment()
    with pytest.raises(ValueError, match="fossils: lora in block1 with blend ADD does not exist"):
        env.reset([1], [EpisodeStart(fossils={"block1": ("lora", "ADD")})])
