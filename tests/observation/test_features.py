from pathlib import Path

import pytest
import torch

from esper.controllers import RandomController
from esper.observation import FEATURE_SETS, observation_page
from esper.observation import features as table
from esper.observation.scale_free import SCALE_FREE
from tests.fixtures_environment import environment
from tests.lifecycle.fixtures_slots import act

BUDGET = ("environment=budget", "environment.batches=null", "environment.budget_batches=40", "lifecycle=quick")


@pytest.mark.parametrize("features", [*FEATURE_SETS.values()], ids=[*FEATURE_SETS])
def test_every_feature_has_its_width_and_stays_in_range_in_random_episodes(features: table.FeatureSet) -> None:
    env = environment(*(BUDGET if features is SCALE_FREE else ()), envs=4)
    controller = RandomController(env.space)
    observation, memory = env.reset([1, 2, 3, 4]), controller.begin([1, 2, 3, 4])
    for _ in range(10):
        for feature in features.base:
            assert feature.make(observation.view).shape == (4, feature.width), feature.name
        for feature in features.per_slot:
            assert feature.make(observation.view).shape == (4, 3, feature.width), feature.name
        assert observation.base.shape == (4, len(features.base_groups))
        assert observation.slots.shape == (4, 3, len(features.slot_groups))
        assert observation.blueprints.shape == (4, 3)
        for part in (observation.base, observation.slots):
            assert part.isfinite().all()
            assert part.abs().max() <= 2
        action, memory = controller.act(observation, memory)
        observation = env.step(action).observation


def column(name: str, features: tuple[table.Feature, ...] = table.BASE) -> slice:
    start = 0
    for feature in features:
        if feature.name == name:
            return slice(start, start + feature.width)
        start += feature.width
    raise KeyError(name)


def test_a_value_that_was_not_measured_yet_is_minus_one() -> None:
    env = environment(envs=1)
    first = env.reset([1])
    assert first.base[0, column("train_loss")] == -1
    assert first.base[0, column("losses")].tolist()[:4] == [-1] * 4
    assert first.base[0, column("losses")][4] != -1
    assert (first.slots[0, :, column("contribution", table.PER_SLOT)] == -1).all()
    assert first.base[0, column("last_op")].sum() == 0


def test_an_observation_has_the_last_action_and_the_blueprints() -> None:
    env = environment(envs=1)
    env.reset([1])
    step = env.step(act(env.space, {"op": "GERMINATE", "slot": "block3", "blueprint": "conv_light"}))
    observation = step.observation
    assert observation.base[0, column("last_op")].tolist() == [0, 1, 0, 0, 0, 0]
    assert observation.slots[0, :, column("last", table.PER_SLOT)].flatten().tolist() == [0, 0, 1]
    assert observation.blueprints.tolist() == [[0, 0, 1 + env.space.blueprints.index("conv_light")]]
    assert observation.base[0, column("progress")].item() == torch.tensor(0.1).item()


def test_an_action_in_all_slots_is_flagged_in_each_slot_that_it_was_in() -> None:
    env = environment("actions=lean", "lifecycle=quick", envs=1)
    env.reset([1])
    last = column("last", table.PER_SLOT)
    env.step(act(env.space, {"op": "GERMINATE", "slot": "block2", "blueprint": "norm"}))
    observation = env.step(act(env.space, {"op": "GERMINATE", "slot": "all", "blueprint": "norm"})).observation
    assert observation.slots[0, :, last].flatten().tolist() == [1, 0, 1]
    assert observation.base[0, column("last_op")].tolist() == [0, 1, 0, 0, 0, 0]
    assert observation.blueprints.tolist() == [[1, 1, 1]]
    observation = env.step(act(env.space, {"op": "WAIT", "slot": "all"})).observation
    assert not observation.slots[0, :, last].any()


def test_the_documentation_page_is_generated_from_the_table() -> None:
    page = Path(__file__).parent.parent.parent / "docs" / "observation.md"
    assert page.read_text() == observation_page()
    assert f"| `{table.PER_SLOT[-1].name}` | {table.PER_SLOT[-1].width} |" in observation_page()


def test_rows_of_an_observation_are_the_observations_of_those_environments() -> None:
    env = environment("environment.steps=3", envs=2)
    env.reset([1, 2])
    both = env.step(torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]])).observation
    second = both.rows(slice(1, 2))
    assert torch.equal(second.base, both.base[1:])
    assert torch.equal(second.masks.slot, both.masks.slot[1:])
    assert torch.equal(second.masks.others["blueprint"], both.masks.others["blueprint"][1:])
    assert torch.equal(second.view.slots.stage, both.view.slots.stage[1:])
    assert torch.equal(second.view.now.score, both.view.now.score[1:])
    assert (second.view.step, second.view.steps) == (1, 3)
