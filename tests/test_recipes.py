"""Recipes of docs/contributing.md, followed end to end: register, build, use; what is registered goes with its test."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.blueprints import blueprint, blueprints, register, registry
from esper.config import build, build_vector_env, compose_config
from esper.controllers import PolicyController
from esper.environment import StepRecord
from esper.flops import Flops, conv_flops
from esper.lifecycle import Slots, Stage
from esper.observation import FEATURE_SETS, Feature, observation_page
from esper.rewards import terms
from tests.fixtures_environment import environment
from tests.lifecycle.fixtures_slots import act


class PointwiseSeed(nn.Module):
    """The identity as long as its last layer is zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.last = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(x)


def pointwise_flops(channels: int, positions: int) -> Flops:
    return conv_flops(channels, channels, 1, positions)


def test_a_blueprint_that_is_registered_germinates_trains_and_is_fossilised(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(blueprints("cnn"))
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_REGISTRY", {name: dict(family) for name, family in registry._REGISTRY.items()})
        register("cnn", "pointwise", lambda channels: channels**2, "one 1x1 convolution", pointwise_flops)(
            PointwiseSeed
        )
        seed, x = blueprint("cnn", "pointwise").build(8), torch.randn(2, 8, 4, 4)
        assert torch.equal(seed(x), x)
        env = environment("slots.blueprints=[norm,pointwise]", envs=1)
        env.reset([1])
        script = {
            0: {"op": "GERMINATE", "slot": "block1", "blueprint": "pointwise"},
            6: {"op": "FOSSILIZE", "slot": "block1"},
        }
        steps = [env.step(act(env.space, script.get(index, {"op": "WAIT"}))) for index in range(env.steps)]
        assert steps[-1].record.after.stage[0, 0] == Stage.FOSSILIZED
        assert steps[-1].record.now.parameters - steps[-1].record.host_parameters == 8**2
    assert list(blueprints("cnn")) == before


@dataclass(frozen=True)
class LiveSeeds:
    """The number of seeds that are not decided yet."""

    weight: float

    def __call__(self, record: StepRecord) -> Tensor:
        return self.weight * record.after.live.sum(1).float()


def test_a_reward_term_with_its_yaml_is_a_part_of_every_steps_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "LiveSeeds", LiveSeeds, raising=False)
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "few_live.yaml").write_text(
        "_target_: esper.rewards.Reward\n"
        "terms:\n"
        "  improvement: {_target_: esper.rewards.terms.Improvement, weight: 1.0}\n"
        "  live: {_target_: esper.rewards.terms.LiveSeeds, weight: -0.5}\n"
    )
    env = environment(f"hydra.searchpath=[file://{tmp_path}]", "reward=few_live", envs=2)
    env.reset([1, 2])
    step = env.step(act(env.space, {"op": "GERMINATE", "slot": "block2", "blueprint": "norm"}, {"op": "WAIT"}))
    assert step.rewarded.parts["live"].tolist() == [-0.5, 0.0]
    assert torch.equal(step.reward, step.rewarded.parts["improvement"] + step.rewarded.parts["live"])


def test_an_observation_feature_reaches_the_policy_and_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    added = Feature("free", 1, lambda view: free_slots(view.slots), "share of slots without a seed")
    features = FEATURE_SETS["absolute"]
    width = len(features.base_groups)
    monkeypatch.setitem(FEATURE_SETS, "absolute", replace(features, base=(*features.base, added)))
    config = compose_config("run", ["+experiment=oracle", "environment.envs=2"])
    env = build_vector_env(config)
    env.reset([1, 2])
    observation = env.step(act(env.space, {"op": "GERMINATE", "blueprint": "norm"}, {"op": "WAIT"})).observation
    assert observation.base.shape == (2, width + 1)
    torch.testing.assert_close(observation.base[:, -1], torch.tensor([2 / 3, 1.0]))
    policy = build(config.policy, layout=env.layout, _partial_=False)
    controller = PolicyController(policy, greedy=True)
    action, _ = controller.act(observation, controller.begin([1, 2]))
    assert action.shape == (2, len(env.space.heads))
    assert "| `free` | 1 |  | share of slots without a seed |" in observation_page()


def free_slots(slots: Slots) -> Tensor:
    return (~slots.occupied).float().mean(1, keepdim=True)
