"""examples/plugin: a host, a blueprint, a data set, a reward term and a controller from outside esper."""

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from esper.blueprints import blueprint, registry
from esper.config import check_config, compose_config
from esper.hosts import count_parameters
from esper.records import read_lines
from tests.fixtures_process import CommandProcess

PLUGIN = Path(__file__).parent.parent / "examples/plugin"


def test_the_plugin_trains_resumes_and_is_evaluated_with_its_own_controller(tmp_path: Path) -> None:
    run, evaluation = tmp_path / "run", tmp_path / "evaluation"

    def run_command(module: str, *arguments: str) -> str:
        arguments = ("--config-dir", "conf", *arguments)
        return CommandProcess(module, *arguments, directory=PLUGIN, output=tmp_path / "output.txt").finish()

    quick = ("validate_every=0", "callbacks.dashboard=null", "environment.workers=0")
    run_command("esper.run", "+experiment=custom", "rounds=1", "environment.envs=2", *quick, f"hydra.run.dir={run}")
    assert "rounds: 1 -> 2" in run_command("esper.run", f"resume={run}", "rounds=2")
    arms = (
        "+controller@controller.custom_controller=custom_controller",
        "controllers=[custom_controller,ppo]",
        "episodes=1",
        "environment.workers=0",
    )
    run_command("esper.evaluate", f"ckpt={run}", *arms, f"hydra.run.dir={evaluation}")
    episodes = {line["arm"]: line for line in read_lines(evaluation / "episodes.jsonl")}
    assert set(episodes) == {"custom_controller", "ppo"}
    episode = episodes["custom_controller"]
    assert (episode["host"], episode["data"]) == ("custom_host", "custom_data")
    assert episode["slots"] == ["block1", "block2", "block3"]
    assert {blueprint for blueprint, _ in episode["fossils"].values()} == {"custom_blueprint"}
    assert "parameter_cost" in episode["steps"][0]["reward_terms"]
    assert "a user-defined controller" in (evaluation / "report.md").read_text()


def test_the_custom_blueprint_is_an_identity_with_the_stated_number_of_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    monkeypatch.setattr(registry, "_REGISTRY", {name: dict(family) for name, family in registry._REGISTRY.items()})
    import_module("custom_plugin.blueprint")
    entry, x = blueprint("cnn", "custom_blueprint"), torch.randn(2, 8, 6, 6)
    seed = entry.build(8)
    for name in [name for name in sys.modules if name.startswith("custom_plugin")]:
        monkeypatch.delitem(sys.modules, name)
    assert torch.equal(seed(x), x)
    assert count_parameters(seed) == entry.parameters(8)


def test_a_missing_plugin_module_is_reported_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^slots\.plugins=.*: there is no module json\.at\.all; its"):
        check_config(compose_config("evaluate", ["slots.plugins=[json.at.all]", "data=synthetic_images"]))
    with pytest.raises(ValueError, match=r"^slots\.plugins=json: must be a list of strings"):
        check_config(compose_config("evaluate", ["slots.plugins=json", "data=synthetic_images"]))
    check_config(compose_config("evaluate", ["slots.plugins=null", "data=synthetic_images"]))
    with pytest.raises(ValueError, match=r"^slots\.plugins=.*: there is no module nowhere\.at\.all; its"):
        check_config(compose_config("evaluate", ["slots.plugins=[nowhere.at.all]", "data=synthetic_images"]))
