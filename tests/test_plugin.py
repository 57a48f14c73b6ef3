"""examples/plugin: a host, a blueprint, data, a reward term and a controller that are not esper's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from esper.config import check_config, compose_config
from esper.records import read_lines

PLUGIN = Path(__file__).parent.parent / "examples/plugin"


def command(module: str, *arguments: str) -> str:
    typed = [sys.executable, "-m", module, "--config-dir", "conf", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(typed, cwd=PLUGIN, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_trains_goes_on_and_is_compared_with_a_controller_of_its_own(tmp_path: Path) -> None:
    run, compared = tmp_path / "run", tmp_path / "compared"
    command("esper.run", "+experiment=garden", "rounds=1", "validate_every=0", f"hydra.run.dir={run}")
    told = command("esper.run", f"resume={run}", "rounds=2")
    assert "rounds: 1 -> 2" in told
    arms = ("+controller@controller.gardener=gardener", "controllers=[gardener,ppo]", "episodes=1")
    command("esper.evaluate", f"ckpt={run}", *arms, f"hydra.run.dir={compared}")
    lines = {line["arm"]: line for line in read_lines(compared / "episodes.jsonl")}
    assert set(lines) == {"gardener", "ppo"}
    gardener = lines["gardener"]
    assert (gardener["host"], gardener["data"], gardener["slots"]) == ("stairs", "slopes", ["step1", "step2", "step3"])
    assert {blueprint for blueprint, _ in gardener["fossils"].values()} == {"cross"}
    assert "thrift" in gardener["steps"][0]["reward_terms"]
    assert "a controller of the user's own" in (compared / "report.md").read_text()


def test_its_blueprint_keeps_the_promises_of_blueprints() -> None:
    script = (
        "import garden.blueprint, torch\n"
        "from esper.blueprints import blueprint; from esper.hosts import parameter_count\n"
        "entry = blueprint('cnn', 'cross'); seed, x = entry.build(8), torch.randn(2, 8, 6, 6)\n"
        "assert torch.equal(seed(x), x) and parameter_count(seed) == entry.parameters(8)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=PLUGIN, check=True)  # its own process: the registry is for good


def test_a_module_that_is_not_there_is_told_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^slots\.plugins: there is no module json\.at\.all; its"):
        check_config(compose_config("evaluate", ["slots.plugins=[json.at.all]", "data=synthetic_images"]))
    with pytest.raises(ValueError, match=r"^slots\.plugins=json: must be a list, \[json\]\.$"):
        check_config(compose_config("evaluate", ["slots.plugins=json", "data=synthetic_images"]))
    check_config(compose_config("evaluate", ["slots.plugins=null", "data=synthetic_images"]))
    with pytest.raises(ValueError, match=r"^slots\.plugins: there is no module nowhere\.at\.all; its"):
        check_config(compose_config("evaluate", ["slots.plugins=[nowhere.at.all]", "data=synthetic_images"]))
