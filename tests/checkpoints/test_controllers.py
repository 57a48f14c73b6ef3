"""Exported and shipped controllers: they act as their run does, and other runs can start from them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console
from torch import nn

from esper.blueprints import blueprints, register, registry
from esper.checkpoints import (
    add_task_overrides,
    apply_trained_values,
    load_controller,
    load_controllers,
    load_start_weights,
    resolve_checkpoint_paths,
    save_controller,
)
from esper.checkpoints.__main__ import main
from esper.config import build_environment, compose_config
from esper.controllers import PRETRAINED, find_checkpoint
from esper.evaluation.run import evaluate
from esper.lifecycle import Layout
from esper.records import read_lines, read_rounds
from esper.training import build_module, train
from tests.evaluation.fixtures_episodes import TASK, TRAINED, evaluated, trained
from tests.fixtures_environment import SMALL

LIMIT = 3_000_000  # bytes of all shipped controllers
SECOND = ("host=cifar_baseline", "seed=1", "policy.hidden=16")  # a run that starts with the weights of the first
SHIPPED_TASK = (
    "+experiment=cifar_ppo", "data=synthetic_images", "data.train=400", "data.validation=100", "data.test=100",
    "environment.workers=0", "environment.threads=1", "environment.budget=0.5", "environment.validation_samples=20",
)  # fmt: skip
pytestmark = pytest.mark.xdist_group("controllers")  # they share a trained run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"), "environment.threads=1", "validate_every=2")


@pytest.fixture(scope="module")
def second(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("second"), *SECOND, f"start={run}")


@pytest.fixture(scope="module")
def layout() -> Layout:
    return build_environment(compose_config("evaluate", TASK)).layout


def export(run: Path, path: Path) -> Path:
    main([str(run), str(path)])
    return path


def read_metadata(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True)["esper"])


def test_an_exported_controller_acts_as_its_run_does_without_the_directory_of_the_run(
    run: Path, tmp_path: Path, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    path = export(copy, tmp_path / "controller.pt")
    assert f"python -m esper.evaluate ckpt={path}" in capsys.readouterr().out
    shutil.rmtree(copy)
    original, exported = load_controller(str(run), layout), load_controller(str(path), layout)
    assert replace(exported.info, command="") == replace(original.info, command="")
    assert (exported.info.gflops or 0) > 0
    assert exported.task == original.task
    assert (exported.weights_digest, exported.label) == (original.weights_digest, str(path))
    few = ("controllers=[ppo]", "episodes=1")
    evaluated(tmp_path / "a", *few, f"ckpt={run}")
    evaluated(tmp_path / "b", *few, f"ckpt={path}")
    (first,), (second,) = read_lines(tmp_path / "a/episodes.jsonl"), read_lines(tmp_path / "b/episodes.jsonl")
    assert first["steps"] == second["steps"]


def test_an_exported_controller_is_plain_data_of_the_policy_and_its_task(run: Path, tmp_path: Path) -> None:
    path = export(run, tmp_path / "controller.pt")
    content = torch.load(path, weights_only=True)
    assert set(content) == {"esper", "state_dict"}
    assert all(name.startswith("policy.") for name in content["state_dict"])
    training = content["esper"]["training"]
    assert "host=cifar_blind" in training["overrides"]
    assert not [o for o in training["overrides"] if o.startswith(("environment.threads", "environment.envs"))]
    assert not {"callbacks", "logger", "trainer"} & set(training["config"])
    assert training["rounds"] == read_rounds(run / "rounds.jsonl")
    assert "host=cifar_blind" in add_task_overrides([f"ckpt={path}"])
    assert path.stat().st_size < (run / "checkpoints/last.ckpt").stat().st_size


def test_an_export_that_fails_is_refused_in_one_sentence(run: Path, tmp_path: Path) -> None:
    path = export(run, tmp_path / "controller.pt")
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"controller\.pt: exists already\.$"):
        main([str(run), str(path)])
    assert path.read_bytes() == before
    with pytest.raises(SystemExit, match="must be a checkpoint, the directory of a run, or pretrained"):
        main([str(tmp_path / "nowhere"), str(tmp_path / "other.pt")])
    with pytest.raises(SystemExit, match=r"controller\.pt: File exists\.$"):
        main([str(run), str(path / "other.pt")])


def test_two_checkpoints_of_one_run_are_refused_as_repetitions(run: Path, tmp_path: Path, layout: Layout) -> None:
    path = export(run, tmp_path / "controller.pt")
    other = export(run / "checkpoints/best.ckpt", tmp_path / "best.pt")
    for names in ([str(run), str(path)], [str(path), str(other)]):
        with pytest.raises(ValueError, match="are of the same run; each must come from another run"):
            load_controllers(names, layout)


def test_an_exported_controller_can_be_exported_again_with_its_training(run: Path, tmp_path: Path) -> None:
    paths = [export(run, tmp_path / "once.pt"), export(tmp_path / "once.pt", tmp_path / "twice.pt")]
    once, twice = (read_metadata(path)["training"] for path in paths)
    assert once == twice
    assert once["config"]["ppo"]["epochs"] == 1
    assert once["config"]["environment"]["threads"] is None  # a key of the machine


def test_a_controller_of_another_kind_of_environment_is_not_exported(tmp_path: Path, run: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    text = (copy / ".hydra/config.yaml").read_text()
    (copy / ".hydra/config.yaml").write_text(
        text.replace("esper.environment.Environment", "esper.gym.GymnasiumVectorEnv")
    )
    with pytest.raises(SystemExit, match=r"was trained on esper\.gym\.GymnasiumVectorEnv, which grows no hosts"):
        main([str(copy), str(tmp_path / "other.pt")])


def test_the_directory_of_a_sweep_stands_for_the_controllers_of_its_jobs_in_order(tmp_path: Path) -> None:
    for job in (10, 9, 0):
        (tmp_path / f"sweep/{job}/.hydra").mkdir(parents=True)
        (tmp_path / f"sweep/{job}/.hydra/config.yaml").touch()
    assert resolve_checkpoint_paths([f"ckpt={tmp_path}/sweep"]) == [
        f"ckpt=['{tmp_path}/sweep']"
    ]  # without multirun.yaml it is not a sweep
    (tmp_path / "sweep/multirun.yaml").touch()
    inside = ",".join(f"'{tmp_path}/sweep/{job}'" for job in (0, 9, 10))
    assert resolve_checkpoint_paths([f"ckpt={tmp_path}/sweep"]) == [f"ckpt=[{inside}]"]
    assert resolve_checkpoint_paths([f"ckpt={tmp_path}/sweep/9"]) == [f"ckpt=['{tmp_path}/sweep/9']"]
    with pytest.raises(ValueError, match=r"ckpt=a,b: must be a list for several checkpoints, ckpt=\[A,B\]\.$"):
        resolve_checkpoint_paths(["ckpt=a,b"])


def test_shipped_controllers_are_small_plain_data_that_learned() -> None:
    assert find_checkpoint("pretrained") == find_checkpoint("pretrained/0")
    assert sum(find_checkpoint(name).stat().st_size for name in PRETRAINED if name != "pretrained") < LIMIT
    assert set(torch.load(find_checkpoint("pretrained"), weights_only=True)) == {"esper", "state_dict"}
    training = read_metadata(find_checkpoint("pretrained"))["training"]
    preset = OmegaConf.to_container(compose_config("run", ["+experiment=cifar_ppo"]).ppo, resolve=False)
    assert isinstance(preset, dict)
    trained = training["config"]["ppo"]
    assert trained == {key: value for key, value in preset.items() if key in trained}, "but for newer keys"
    scores = [line["episode/score"] for line in training["rounds"]]
    assert sum(scores[-3:]) > sum(scores[:3]) + 3 * 3.0, "points"


def test_a_shipped_controller_can_be_used_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for job in range(2):  # a sweep of the same name
        (tmp_path / f"pretrained/{job}/.hydra").mkdir(parents=True)
        (tmp_path / f"pretrained/{job}/.hydra/config.yaml").touch()
    (tmp_path / "pretrained/multirun.yaml").touch()
    assert resolve_checkpoint_paths(["ckpt=pretrained"]) == ["ckpt=['pretrained']"]
    assert "+experiment=cifar_ppo" in add_task_overrides(["ckpt=pretrained"])
    name = "pretrained"
    controller = load_controller(name, build_environment(compose_config("evaluate", SHIPPED_TASK)).layout)
    assert controller.label == name
    assert controller.info.trained_on == "cifar_blind on cifar10"
    assert (controller.info.gflops or 0) > 0
    arms = compose_config("evaluate", [*SHIPPED_TASK, "controllers=[ppo]", "episodes=2", "ckpt=pretrained"])
    evaluate(arms, tmp_path / "out", Console(quiet=True), "a command")
    lines = list(read_lines(tmp_path / "out/episodes.jsonl"))
    assert {line["checkpoint"] for line in lines} == {name}
    assert all(step["action"]["op"] in step["legal"] for line in lines for step in line["steps"])
    assert any(step["action"]["op"] == "GERMINATE" for line in lines for step in line["steps"])


def test_the_shipped_controller_acts_in_one_round_of_hosts_with_1_to_8_slots(tmp_path: Path) -> None:
    arms = ["host=cifar_slots", "environment.envs=5", "controllers=[ppo]", "episodes=5", "ckpt=pretrained"]
    evaluate(compose_config("evaluate", [*SHIPPED_TASK, *arms]), tmp_path, Console(quiet=True), "a command")
    lines = list(read_lines(tmp_path / "episodes.jsonl"))
    assert sorted(len(line["slots"]) for line in lines) == [1, 2, 3, 5, 8]
    for line in lines:
        assert all(step["action"]["op"] in step["legal"] for step in line["steps"])
        grown = [step["action"]["slot"] for step in line["steps"] if step["action"]["op"] == "GERMINATE"]
        assert set(grown) <= set(line["slots"])
    assert any(line["fossils"] for line in lines)


@pytest.mark.parametrize("name", ["pretrained", "run"])
def test_a_blueprint_that_is_registered_later_does_not_keep_a_controller_from_loading(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._REGISTRY, "cnn", dict(registry._REGISTRY["cnn"]))  # removes it after the test
    register("cnn", "later", parameters=lambda channels: 0, description="none")(lambda channels: nn.Identity())
    checkpoint, sizes = (str(run), SMALL) if name == "run" else (name, SHIPPED_TASK[1:])
    overrides = add_task_overrides([*sizes, f"ckpt={checkpoint}"])
    config = apply_trained_values(compose_config("evaluate", overrides), overrides, [checkpoint])
    controller = load_controller(checkpoint, build_environment(config).layout)
    assert "later" in blueprints("cnn")
    assert "later" not in controller.policy.layout.blueprints
    assert list(controller.policy.layout.blueprints) == list(config.slots.blueprints)


def test_an_exported_controller_stores_the_resolved_list_of_blueprints(run: Path, tmp_path: Path) -> None:
    assert OmegaConf.load(run / ".hydra/config.yaml").slots.blueprints is None
    save_controller(str(run), tmp_path / "controller.pt")
    stored = read_metadata(tmp_path / "controller.pt")
    assert stored["training"]["config"]["slots"]["blueprints"] == list(blueprints("cnn"))
    assert stored["layout"]["blueprints"] == list(blueprints("cnn"))


def test_a_run_starts_with_the_weights_of_a_controller_except_for_the_critic(
    run: Path, tmp_path: Path, layout: Layout
) -> None:
    config = compose_config("run", [*TASK, *SECOND, f"start={run}"])
    policy = build_module(config, build_environment(config)).policy
    first = {key: value.clone() for key, value in policy.state_dict().items()}
    load_start_weights(str(run), policy)
    loaded = load_controller(str(run), layout).policy.state_dict()
    for key, value in policy.state_dict().items():
        assert torch.equal(value, (first if key.startswith("critic.") else loaded)[key]), key
    assert policy.base_statistics.count > 0  # no warm-up is needed


def test_a_run_with_all_slots_as_an_option_starts_with_a_controller_that_does_not_know_it(run: Path) -> None:
    overrides = [*TASK, *SECOND, "actions=lean", "lifecycle=quick"]
    config = compose_config("run", [*overrides, f"start={run}"])
    policy = build_module(config, build_environment(config)).policy
    load_start_weights(str(run), policy)
    assert policy.known == {}, "it may learn the option"
    assert not any(part.any() for part in policy.all_slots.parameters())
    loaded = load_controller(str(run), policy.layout).policy
    assert loaded.known["slot"].tolist() == [True] * 3 + [False]
    assert torch.equal(loaded.heads["slot"][0].weight, policy.heads["slot"][0].weight)


@pytest.fixture(scope="module")
def with_separate_critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("separate"), "environment.threads=1", "ppo=many_tasks")


def test_a_controller_is_exported_without_its_separate_critic_and_acts(
    with_separate_critic: Path, run: Path, tmp_path: Path, layout: Layout
) -> None:
    path = export(with_separate_critic, tmp_path / "controller.pt")
    content = torch.load(path, weights_only=True)
    assert not [name for name in content["state_dict"] if "critic" in name or "scale" in name]
    loaded, shared = load_controller(str(path), layout), load_controller(str(run), layout)
    assert loaded.policy.critic is None
    assert loaded.policy.flops < shared.policy.flops
    assert (loaded.info.gflops or 0) > 0
    evaluated(tmp_path / "a", "controllers=[ppo]", "episodes=1", f"ckpt={path}")


def test_a_run_starts_from_a_controller_with_another_kind_of_critic(
    with_separate_critic: Path, run: Path, layout: Layout
) -> None:
    for start, settings in ((with_separate_critic, "ppo=default"), (run, "ppo=many_tasks")):
        config = compose_config("run", [*TASK, "policy.hidden=16", settings, f"start={start}"])
        policy = build_module(config, build_environment(config)).policy
        load_start_weights(str(start), policy)
        loaded = load_controller(str(start), layout).policy.state_dict()
        assert torch.equal(policy.state_dict()["heads.op.0.weight"], loaded["heads.op.0.weight"])


def test_the_cost_of_a_run_includes_that_of_the_controller_it_started_with(
    run: Path, second: Path, tmp_path: Path, layout: Layout
) -> None:
    before, after = (load_controller(str(path), layout).info for path in (run, second))
    assert after.episodes == 2 * before.episodes
    assert (after.gflops or 0) > (before.gflops or 0) > 0
    assert load_controller(str(export(second, tmp_path / "exported.pt")), layout).info.gflops == after.gflops
    longer = tmp_path / "longer"
    shutil.copytree(second, longer)
    train(compose_config("run", [*TRAINED, *SECOND, f"start={run}", "rounds=3"]), longer, Console(quiet=True), [])
    resumed = load_controller(str(longer), layout).info
    assert resumed.episodes == after.episodes + 3
    assert (resumed.gflops or 0) > (after.gflops or 0)


def test_a_resumed_run_starts_with_its_own_weights_and_not_with_those_of_start(
    run: Path, second: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(second, copy)
    saved = torch.load(copy / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    config = compose_config("run", [*TRAINED, *SECOND, f"start={run}"])
    train(config, copy, Console(quiet=True), [])  # all rounds are done
    resumed = torch.load(copy / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(resumed[key], value) for key, value in saved.items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["start=nowhere"],
            r"^start=nowhere: must be a checkpoint, the directory of a run, or pretrained; there is no",
        ),
        (["start=[pretrained]"], r"^start=\['pretrained'\]: must be a string that is not empty, or null\.$"),
        (["policy.hidden=8"], r"^start=.*: must have the network of this run, but has policy\.hidden=16\.$"),
        (
            ["+environment.features=scale_free"],
            r"^start=.*: was trained with environment.features=absolute, but this task has scale_free; they must be",
        ),
    ],
)
def test_a_start_that_does_not_fit_is_refused_in_one_sentence(
    run: Path, tmp_path: Path, changes: list[str], sentence: str
) -> None:
    config = compose_config("run", [*TASK, "policy.hidden=16", f"start={run}", *changes])
    with pytest.raises(ValueError, match=sentence):
        train(config, tmp_path, Console(quiet=True))
    assert not (tmp_path / "checkpoints").exists()
