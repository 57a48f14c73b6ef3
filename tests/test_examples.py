"""The examples that grow a network, and their comparison, with tiny data."""

import importlib.util
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.config import load_preset
from esper.data import Data
from esper.growth import find_hooked_slots
from tests.fixtures_examples import EXAMPLES, PROJECT, load_script, small_images

NOTEBOOK = EXAMPLES / "grow_your_own.ipynb"
IMAGES = "resolution=8, train=300, validation=40, test=40"
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


def stories() -> Data:
    sizes = {"train_bytes": 20_000, "validation_bytes": 2_000, "test_bytes": 2_000}
    data: Data = load_preset("data/synthetic_stories", vocabulary=257, block_size=16, **sizes)
    return data


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # Lightning writes logs and checkpoints there
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))


def test_the_lightning_example_grows_and_merges(capsys: pytest.CaptureFixture[str]) -> None:
    merged = load_script("grow_your_own").train(small_images(), epochs=5)
    assert "bit-equal after merging: True" in capsys.readouterr().out
    assert not find_hooked_slots(merged)
    assert len((EXAMPLES / "grow_your_own.py").read_text().splitlines()) < 60


def test_the_plain_loop_grows_and_merges(capsys: pytest.CaptureFixture[str]) -> None:
    merged = import_module("plain_loop").train(small_images(), epochs=6, batch=32)
    printed = capsys.readouterr().out
    assert "planted" in printed
    assert "fossilized" in printed
    assert not find_hooked_slots(merged)


@pytest.mark.skipif(HAS_TRANSFORMERS, reason="transformers is installed")
def test_the_gpt2_example_names_the_missing_package_in_one_sentence() -> None:
    with pytest.raises(
        SystemExit, match=r"^examples/grow_gpt2.py needs transformers: pip install 'esper\[examples\]'.$"
    ):
        load_script("grow_gpt2")


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
def test_the_gpt2_example_grows_and_merges(capsys: pytest.CaptureFixture[str]) -> None:
    merged = load_script("grow_gpt2").train(stories(), epochs=5, batches=4, batch=4)
    assert "outputs are equal after merging: True" in capsys.readouterr().out
    assert not find_hooked_slots(merged)


def notebook_cells() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_has_the_network_of_the_script_and_no_outputs() -> None:
    notebook, script = json.loads(NOTEBOOK.read_text()), (EXAMPLES / "grow_your_own.py").read_text()
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in notebook_cells())
    network = next("".join(cell["source"]) for cell in notebook_cells() if "class ResNet" in "".join(cell["source"]))
    assert network in script


def test_the_notebook_runs() -> None:
    code = "\n".join("".join(cell["source"]) for cell in notebook_cells())
    small = code.replace('cifar10", resolution=16', f'synthetic_images", {IMAGES}').replace(
        "ResNet()", "ResNet(epochs=4)"
    )
    assert small != code
    names: dict[str, Any] = {}
    exec(small.replace("torch.equal(", "is_equal = torch.equal("), names)
    assert names["is_equal"] is True
    assert len(names["grow"].history) == 4


def test_the_comparison_runs_each_arm_at_equal_flops_once_and_prints_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, data, budget = load_script("grow_your_own", PROJECT / "benchmarks"), small_images(), 3e8
    made: list[str] = []
    real = script.make_task

    def make_task(name: str, root: str | None) -> Any:
        made.append(name)
        return real(name, root, data)

    monkeypatch.setattr(script, "make_task", make_task)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    arguments = ["grow_your_own.py", "--seeds", "2", "--budget", str(budget), "--steps", "6", "--out", "runs.jsonl"]
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()
    records = script.read_records(tmp_path / "runs.jsonl")
    assert [(record["arm"], record["seed"]) for record in records] == [(a, s) for s in (0, 1) for a in script.ARMS]
    assert all(budget <= record["flops"] < 1.2 * budget for record in records)
    by_arm = {record["arm"]: record for record in records}
    assert by_arm["bare"]["grown"] == {}
    assert by_arm["full"]["grown"] == dict.fromkeys(("layer1", "layer2", "layer3"), "depthwise")
    assert "general - arm" in capsys.readouterr().out
    script.main()
    assert len(script.read_records(tmp_path / "runs.jsonl")) == len(records)
    assert made == ["resnet"]


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
@pytest.mark.parametrize("arm", ["full", "general"])
def test_the_comparison_grows_gpt2_within_its_budget(arm: str) -> None:
    script = load_script("grow_your_own", PROJECT / "benchmarks")
    record = script.run(script.make_task("gpt2", None, stories()), arm, 0, budget=2e9, steps=5)
    assert 2e9 <= record["flops"] < 2.4e9
    assert all(slot.startswith("model.transformer.h.") for slot in record["grown"])
    assert len(record["grown"]) == 3 or arm == "general"
