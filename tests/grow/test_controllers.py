"""Controllers by name, without Hydra."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

import esper
from esper.config import load_preset
from esper.controllers import PRETRAINED, PolicyController, build_policy, read_controller
from esper.grow.controllers import RULE_SETTINGS, RULES, choose_controller, quick_rules
from esper.grow.grower import Grower
from esper.growth import Mode
from esper.lifecycle import ActionSpace, Rules
from esper.observation import FEATURE_SETS, make_layout
from tests.grow.fixtures_networks import ResNet, TextNet, images, run_loop, tokens

PROJECT = Path(esper.__file__).parent.parent
CHOICES: dict[str, Any] = {"slots": ["a", "b"], "blueprints": ["norm", "depthwise"], "traits": {}, "steps": 20}


def read_yaml(name: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load((PROJECT / "conf" / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", RULE_SETTINGS)
def test_settings_of_rules_are_those_of_the_experiments(name: str) -> None:
    saved = read_yaml(f"controller/{name}")
    shared = {key: value for key, value in RULE_SETTINGS[name].items() if not str(saved[key]).startswith("$")}
    assert {key: list(value) if isinstance(value, tuple) else value for key, value in shared.items()} == {
        key: value for key, value in saved.items() if key in shared
    }
    assert set(RULE_SETTINGS[name]) | {"blueprint", "blueprints"} >= {key for key in saved if not key.startswith("_")}
    latest = read_yaml("evaluate")["growth"]["auto"]["latest"]
    assert RULE_SETTINGS[name].get("latest", latest) == latest


def test_the_rules_of_growth_are_those_of_quick_lifecycles() -> None:
    saved = load_preset("lifecycle/quick", steps=20)
    assert isinstance(saved, Rules)
    assert vars(saved) == vars(quick_rules(20))


@pytest.mark.parametrize("name", RULES)
def test_every_rule_is_built_by_its_name(name: str) -> None:
    maker = choose_controller(name, **CHOICES)
    controller = maker.build(())
    assert controller.begin([0]) is not None or name == "none"


def test_settings_replace_the_defaults_of_a_rule() -> None:
    with pytest.raises(ValueError, match=r"controller.gated.wait=2: must be between 0 and 1"):
        choose_controller("gated", **CHOICES, settings={"wait": 2}).build(())


def test_a_trained_controller_keeps_its_ops_heads_and_rules() -> None:
    maker = choose_controller("pretrained", **CHOICES)
    assert [op.name for op in maker.space.ops] == ["WAIT", "GERMINATE", "PRUNE", "FOSSILIZE"]
    assert maker.space.head_names == ("op", "slot", "blueprint", "blend")
    assert maker.features.name == "scale_free"
    assert vars(maker.rules) == vars(quick_rules(20))


def test_groups_of_features_that_are_missing_are_marked() -> None:
    saved = read_controller("pretrained")
    space = ActionSpace(
        slots=["a"], blueprints=["norm"], ops=["WAIT", "GERMINATE"], heads=["op", "blueprint"],
        fixed={"blend": "ADD", "tempo": "FAST", "alpha_target": "FULL"},
    )  # fmt: skip
    policy = build_policy(saved, make_layout(space, FEATURE_SETS["scale_free"]))
    controller = PolicyController(policy, greedy=True, missing=("contribution", "train_loss"))
    available = dict(zip(policy.layout.groups, controller.begin([0]).available[0].tolist(), strict=True))
    assert available == {"flops": True, "train_loss": False, "gradients": True, "contribution": False}


def test_a_training_without_train_loss_and_contributions_marks_them_missing() -> None:
    model = ResNet()
    grower = Grower(model, SGD(model.parameters(), lr=0.1), example=images(), steps=5, controller="pretrained")
    grower.step(val_loss=1.0)
    assert grower.state_dict()["plan"]["missing"] == ["contribution", "train_loss"]


def test_a_path_is_a_controller_too() -> None:
    assert choose_controller(str(PRETRAINED["pretrained"]), **CHOICES).name == "cifar_ppo_0"


def test_a_controller_for_images_grows_a_text_network() -> None:
    torch.manual_seed(0)
    model = TextNet()
    optimizer = SGD(model.parameters(), lr=0.1)
    grower = Grower(model, optimizer, example=tokens(), steps=6, controller="pretrained", causal=True)
    for _ in range(6):
        loss = model(tokens()).square().mean()
        loss.backward()
        optimizer.step()
        grower.step(val_loss=loss, train_loss=loss)
    assert len(grower.explain()) == 5


def test_an_explanation_has_probabilities_and_the_five_most_unusual_features() -> None:
    torch.manual_seed(0)
    model = ResNet()
    optimizer = SGD(model.parameters(), lr=0.1)
    grower = Grower(model, optimizer, example=images(), steps=5, controller="pretrained")
    run_loop(model, optimizer, grower, range(5))
    for record in grower.explain():
        assert all(sum(options.values()) == pytest.approx(1, abs=1e-4) for options in record["probabilities"].values())
        sizes = [abs(value) for value in record["features"].values()]
        assert len(sizes) == 5
        assert sizes == sorted(sizes, reverse=True)


def test_growing_imports_neither_hydra_nor_lightning() -> None:
    code = (
        "import sys, esper; assert 'torch' not in sys.modules; esper.Grower, esper.slots, esper.merge, esper.save, "
        "esper.load, esper.disabled, esper.blueprint; from esper.controllers import read_controller; "
        "read_controller('pretrained'); assert not {'hydra', 'omegaconf', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PROJECT)


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    assert "Grower" in dir(esper)
    with pytest.raises(AttributeError, match="has no attribute 'Growr'"):
        esper.Growr  # noqa: B018
    assert Mode.BLENDED.value == "blended"
