"""examples/plugin: a host, a blueprint, a data set, a reward term and a controller from outside esper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from esper.config import check_config, compose_config
from esper.records import read_lines

PLUGIN = Path(__file__).parent.parent / "examples/plugin"


def run_command(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, "--config-dir", "conf", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=PLUGIN, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_plugin_trains_resumes_and_is_evaluated_with_its_own_controller(tmp_path: Path) -> None:
    run, evaluation = tmp_path / "run", tmp_path / "evaluation"
    quick = ("validate_every=0", "callbacks.dashboard=null")
    run_command("esper.run", "+experiment=custom", "rounds=1", "environment.envs=2", *quick, f"hydra.run.dir={run}")
    assert "rounds: 1 -> 2" in run_command("esper.run", f"resume={run}", "rounds=2")
    arms = (
        "+controller@controller.custom_controller=custom_controller",
        "controllers=[custom_controller,ppo]",
        "episodes=1",
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


def test_the_custom_blueprint_is_an_identity_with_the_stated_number_of_parameters() -> None:
    script = (
        "import custom_plugin.blueprint, torch\n"
        "from esper.blueprints import blueprint; from esper.hosts import count_parameters\n"
        "entry = blueprint('cnn', 'custom_blueprint'); seed, x = entry.build(8), torch.randn(2, 8, 6, 6)\n"
        "assert torch.equal(seed(x), x) and count_parameters(seed) == entry.parameters(8)"
    )
    # a separate process, because a registered blueprint cannot be removed
    subprocess.run([sys.executable, "-c", script], cwd=PLUGIN, check=True)


def test_a_missing_plugin_module_is_reported_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^slots\.plugins: there is no module json\.at\.all; its"):
        check_config(compose_config("evaluate", ["slots.plugins=[json.at.all]", "data=synthetic_images"]))
    with pytest.raises(ValueError, match=r"^slots\.plugins=json: must be a list, \[json\]\.$"):
        check_config(compose_config("evaluate", ["slots.plugins=json", "data=synthetic_images"]))
    check_config(compose_config("evaluate", ["slots.plugins=null", "data=synthetic_images"]))
    with pytest.raises(ValueError, match=r"^slots\.plugins: there is no module nowhere\.at\.all; its"):
        check_config(compose_config("evaluate", ["slots.plugins=[nowhere.at.all]", "data=synthetic_images"]))
