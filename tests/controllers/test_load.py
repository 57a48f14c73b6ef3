"""Trained controllers are read from their files without Hydra."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from esper.controllers import PRETRAINED, PolicyController, build_policy, read_controller

SHIPPED = PRETRAINED["pretrained"]


def content() -> dict[str, Any]:
    return torch.load(SHIPPED, weights_only=True)


def make_run(place: Path, scores: tuple[float, float] = (1.0, 2.0)) -> Path:
    """The directory of a run, as training leaves it."""
    saved = content()
    config = saved["esper"].pop("training")["config"]
    for directory in (place / "checkpoints", place / ".hydra"):
        directory.mkdir(parents=True)
    torch.save(saved, place / "checkpoints" / "last.ckpt")
    (place / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    line = {"round": 1, "validation/greedy_score": scores[0], "validation/sampled_score": scores[1]}
    later = {"round": 999, "validation/greedy_score": 9.0, "validation/sampled_score": 0.0}
    (place / "rounds.jsonl").write_text("\n".join([json.dumps(line), json.dumps(later), '{"round": 1']))
    return place


def test_a_run_and_its_exported_file_are_the_same_controller(tmp_path: Path) -> None:
    run, file = read_controller(str(make_run(tmp_path / "run"))), read_controller("pretrained")
    assert run.layout == file.layout
    assert run.settings == file.settings
    assert run.weights.keys() == file.weights.keys()
    policy = build_policy(run, run.layout)
    assert all(
        torch.equal(value, file.weights[name]) for name, value in policy.state_dict().items() if name in file.weights
    )
    assert PolicyController(policy, greedy=True).flops > 0


@pytest.mark.parametrize(("scores", "is_greedy"), [((1.0, 2.0), False), ((2.0, 1.0), True)])
def test_a_controller_acts_as_it_scored_higher(tmp_path: Path, scores: tuple[float, float], is_greedy: bool) -> None:
    assert read_controller(str(make_run(tmp_path / "run", scores))).is_greedy is is_greedy


def test_files_that_are_no_controllers_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a checkpoint, the directory of a run, or pretrained"):
        read_controller(str(tmp_path / "none.ckpt"))
    torch.save({"weights": 1}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match="is a checkpoint, but not of esper"):
        read_controller(str(tmp_path / "foreign.pt"))
    (tmp_path / "noise.pt").write_bytes(b"noise")
    with pytest.raises(ValueError, match="is not a readable checkpoint"):
        read_controller(str(tmp_path / "noise.pt"))
    run = make_run(tmp_path / "run")
    (run / ".hydra" / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"its run's configuration \(.hydra/config.yaml\) is missing"):
        read_controller(str(run))


def test_a_policy_with_settings_of_another_version_is_refused(tmp_path: Path) -> None:
    saved = content()
    saved["esper"]["training"]["config"]["policy"]["spirals"] = 3
    torch.save(saved, tmp_path / "newer.pt")
    controller = read_controller(str(tmp_path / "newer.pt"))
    with pytest.raises(ValueError, match=r"has settings that this esper does not know .*spirals"):
        build_policy(controller, controller.layout)
