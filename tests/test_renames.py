"""Names of version 0.1: refused with the new name where they are typed, and converted where they are read."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import get_object
from omegaconf import OmegaConf

from esper.checkpoints import read_origin
from esper.checkpoints.resume import merge_overrides
from esper.checkpoints.runs import read_overrides
from esper.command_line import CONF, check_renamed
from esper.config import build, compose_config, flatten, migrate_config
from esper.controllers import find_checkpoint
from esper.renames import KEYS, MODULES, NEW_TARGETS, OPTIONS, TARGETS, renamed_key
from esper.run import cli

OLD_KEYS = {key: f"{key.rpartition('.')[0]}.{new}" for key, new in KEYS.items()}


@pytest.mark.parametrize("old", KEYS)
def test_every_renamed_key_is_refused_with_the_new_one_which_exists(old: str) -> None:
    key, new = old.replace("*", "term"), OLD_KEYS[old].replace("*", "term")
    for prefix in ("", "+", "++", "~"):
        with pytest.raises(ValueError, match=rf"^{key}: is now {new}\.$"):
            check_renamed([f"{prefix}{key}=1"])
    check_renamed([f"{new}=1"])
    group = old.split(".")[0]
    files = [flatten(OmegaConf.create(yaml.safe_load(path.read_text()))) for path in (CONF / group).glob("*.yaml")]
    assert any(key.rpartition(".")[2] == KEYS[old] for file in files for key in file)


@pytest.mark.parametrize(("group", "old"), OPTIONS)
def test_every_renamed_option_is_refused_with_the_new_one_which_exists(group: str, old: str) -> None:
    new = OPTIONS[group, old]
    for prefix in ("", "+"):
        with pytest.raises(ValueError, match=rf"{group}={old}: is now {'[+]' if prefix else ''}{group}={new}\.$"):
            check_renamed(["rounds=1", f"{prefix}{group}={old}"])
    assert (CONF / group / f"{new}.yaml").is_file()
    assert not (CONF / group / f"{old}.yaml").exists()


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["ppo.foretells=rest"], "ppo.foretells: is now ppo.value_target."),
        (["policy.most=3"], "policy.most: is now policy.clip."),
        (["governor.factor=2"], "governor.factor: is now governor.mean_factor."),
        (["reward.terms.shaping.most=1"], "reward.terms.shaping.most: is now reward.terms.shaping.cap."),
        (["policy=lstm_open"], "policy=lstm_open: is now policy=lstm_floors."),
        (["+ablation=critic_of_rest"], "+ablation=critic_of_rest: is now +ablation=value_target_rest."),
        (["-m", "policy=lstm,lstm_open"], "policy=lstm,lstm_open: is now policy=lstm,lstm_floors."),
    ],
)
def test_an_old_name_on_the_command_line_ends_in_one_sentence(
    typed: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["esper.run", *typed])
    with pytest.raises(SystemExit) as stop:
        cli()
    assert str(stop.value) == message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("old", MODULES)
def test_the_error_for_an_old_module_names_the_new_one(old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"^{old} is now {MODULES[old]}$"):
        importlib.import_module(old)
    assert importlib.import_module(MODULES[old])


def test_the_old_command_ends_in_one_line_that_names_the_new_module() -> None:
    result = subprocess.run([sys.executable, "-m", "esper.learners"], capture_output=True, text=True)
    (line,) = result.stderr.splitlines()
    assert "esper.learners is now esper.checkpoints" in line
    assert result.returncode != 0


@pytest.mark.parametrize("old", TARGETS)
def test_an_old_target_is_refused_with_the_new_one_which_can_be_imported(old: str) -> None:
    assert callable(get_object(TARGETS[old]))
    with pytest.raises(ValueError, match=rf"^_target_={old}: is now {TARGETS[old]}\.$"):
        build(OmegaConf.create({"_target_": old}))
    with pytest.raises(ValueError, match=rf"^part\._target_={old}: is now {TARGETS[old]}\.$"):
        build(OmegaConf.create({"_target_": "builtins.dict", "part": {"_target_": old}}))


def test_an_old_argument_of_a_target_is_refused_with_the_new_one() -> None:
    with pytest.raises(
        ValueError, match=r"^foretells: is not an argument of esper\.ppo\.PPOSettings; it is now value_target"
    ):
        build(compose_config("run").ppo, foretells="rest")


def downgrade(node: Any, path: str = "") -> Any:
    """A configuration with the keys and targets of version 0.1."""
    if isinstance(node, list):
        return [downgrade(entry, path) for entry in node]
    if not isinstance(node, dict):
        return node
    old_targets = {new: old for old, new in TARGETS.items()}
    result = {}
    for key, value in node.items():
        full_key = f"{path}.{key}" if path else key
        parent = full_key.rpartition(".")[0]
        olds = [old.rpartition(".")[2] for old, new in KEYS.items() if new == key]
        old = next((old for old in olds if renamed_key(f"{parent}.{old}") == full_key), key)
        result[old] = old_targets.get(value, value) if key == "_target_" else downgrade(value, full_key)
    if path in NEW_TARGETS:
        del result["_target_"]
    return result


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("run", ["+experiment=cifar_ppo", "reward=shaped"]),
        ("run", ["+experiment=cartpole_memory", "reward=basic"]),
        ("evaluate", ["+experiment=tinystories_ppo", "reward=minimal"]),
    ],
)
def test_a_configuration_of_version_0_1_is_converted(name: str, overrides: list[str]) -> None:
    config = compose_config(name, overrides)
    old = OmegaConf.create(downgrade(OmegaConf.to_container(config, resolve=False)))
    assert "foretells" in old.get("ppo", {"foretells": None})
    assert old != config
    assert migrate_config(old) == config
    assert migrate_config(config) == config


def test_a_run_directory_of_version_0_1_is_read_with_the_new_names(tmp_path: Path) -> None:
    old = ["+experiment=cifar_ppo", "+ablation=critic_of_rest", "policy=lstm_open", "policy.most=3", "ppo.lr=0.001"]
    new = [
        "+experiment=cifar_ppo",
        "+ablation=value_target_rest",
        "policy=lstm_floors",
        "policy.clip=3",
        "ppo.lr=0.001",
    ]
    config = compose_config("run", new)
    saved = downgrade(OmegaConf.to_container(config, resolve=False))
    assert (saved["policy"]["most"], saved["ppo"]["foretells"]) == (3, "rest")
    assert saved["ppo"]["_target_"] == "esper.ppo.Settings"
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text(yaml.safe_dump(saved))
    (tmp_path / ".hydra/overrides.yaml").write_text(yaml.safe_dump(old))
    assert read_overrides(tmp_path) == new
    longer = [*new, "rounds=99"]
    merged, changes = merge_overrides(compose_config("run", longer), tmp_path, overrides=longer)
    assert changes == [f"rounds: {config.rounds} -> 99"]
    assert merged == compose_config("run", longer)


def test_an_exported_controller_of_version_0_1_is_refused_in_one_sentence(tmp_path: Path) -> None:
    content = torch.load(find_checkpoint("pretrained"), weights_only=True)
    content["esper"]["version"] = 1
    torch.save(content, tmp_path / "old.pt")
    with pytest.raises(ValueError, match=r"old\.pt: has version 1, of a policy for a fixed number of slots; "):
        read_origin(tmp_path / "old.pt")
