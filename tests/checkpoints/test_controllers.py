"""Trained controllers as files: what is kept plays as its run does, and one comes with the package."""

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console

from esper.checkpoints import (
    add_task_overrides,
    find_checkpoint,
    load_controller,
    load_controllers,
    load_start_weights,
    resolve_checkpoint_paths,
)
from esper.checkpoints.__main__ import main
from esper.checkpoints.origin import PRETRAINED
from esper.config import build_environment, compose_config
from esper.lifecycle import Layout
from esper.records import read_lines, read_rounds
from esper.training import build_module, train
from tests.evaluation.fixtures_episodes import TASK, TRAINED, evaluated, trained

LIMIT = 3_000_000  # bytes that controllers may add to the package
pytestmark = pytest.mark.xdist_group("learners")  # what they share is made once


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"), "environment.threads=1", "validate_every=2")


@pytest.fixture(scope="module")
def layout() -> Layout:
    return build_environment(compose_config("evaluate", TASK)).layout


def kept(run: Path, path: Path) -> Path:
    main([str(run), str(path)])
    return path


def test_a_kept_controller_plays_as_its_run_does_with_nothing_beside_it(
    run: Path, tmp_path: Path, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(run, gone)
    path = kept(gone, tmp_path / "controller.pt")
    assert f"python -m esper.evaluate ckpt={path}" in capsys.readouterr().out
    shutil.rmtree(gone)
    whole = load_controller(str(run), layout)
    alone = load_controller(str(path), layout)
    assert {**alone.about, "command": None} == {**whole.about, "command": None}
    assert alone.about["gflops"] > 0
    assert alone.task == whole.task
    assert (alone.weights, alone.label) == (whole.weights, str(path))
    few = ("controllers=[ppo]", "episodes=1")
    evaluated(tmp_path / "a", *few, f"ckpt={run}")
    evaluated(tmp_path / "b", *few, f"ckpt={path}")
    (first,), (second,) = read_lines(tmp_path / "a/episodes.jsonl"), read_lines(tmp_path / "b/episodes.jsonl")
    assert first["steps"] == second["steps"]


def test_a_kept_controller_is_plain_and_holds_only_the_policy_and_its_task(run: Path, tmp_path: Path) -> None:
    path = kept(run, tmp_path / "controller.pt")
    found = torch.load(path, weights_only=True)
    assert set(found) == {"esper", "state_dict"}
    assert all(name.startswith("policy.") for name in found["state_dict"])
    origin = found["esper"]["origin"]
    assert "host=cifar_blind" in origin["overrides"]
    assert not [o for o in origin["overrides"] if o.startswith(("environment.threads", "environment.envs"))]
    assert not {"callbacks", "logger", "trainer"} & set(origin["config"])
    assert origin["rounds"] == read_rounds(run / "rounds.jsonl")
    typed = add_task_overrides([f"ckpt={path}"])
    assert "host=cifar_blind" in typed
    assert path.stat().st_size < (run / "checkpoints/last.ckpt").stat().st_size


def test_what_cannot_be_kept_is_refused_in_one_sentence(run: Path, tmp_path: Path) -> None:
    path = kept(run, tmp_path / "controller.pt")
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"controller\.pt: exists already\.$"):
        main([str(run), str(path)])
    assert path.read_bytes() == before
    with pytest.raises(SystemExit, match="must be a checkpoint, the directory of a run, or pretrained"):
        main([str(tmp_path / "nowhere"), str(tmp_path / "other.pt")])
    with pytest.raises(SystemExit, match=r"controller\.pt: File exists\.$"):
        main([str(run), str(path / "other.pt")])


def test_one_controller_in_two_places_counts_once(run: Path, tmp_path: Path, layout: Layout) -> None:
    path = kept(run, tmp_path / "controller.pt")
    other = kept(run / "checkpoints/best.ckpt", tmp_path / "best.pt")
    for names in ([str(run), str(path)], [str(path), str(other)]):
        with pytest.raises(ValueError, match="are of one run; each must be a controller of its own"):
            load_controllers(names, layout)


def test_what_is_kept_can_be_kept_again_and_says_how_it_was_trained(run: Path, tmp_path: Path) -> None:
    again = kept(kept(run, tmp_path / "once.pt"), tmp_path / "twice.pt")
    once, twice = (torch.load(path, weights_only=True)["esper"]["origin"] for path in (tmp_path / "once.pt", again))
    assert once == twice
    assert once["config"]["ppo"]["epochs"] == 1
    assert once["config"]["environment"]["threads"] is None  # of that machine


def test_a_controller_of_something_else_is_not_kept(tmp_path: Path, run: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    text = (copy / ".hydra/config.yaml").read_text()
    (copy / ".hydra/config.yaml").write_text(
        text.replace("esper.environment.Environment", "esper.gym.GymnasiumVectorEnv")
    )
    with pytest.raises(SystemExit, match=r"was trained on esper\.gym\.Gymnasium, which grows no hosts"):
        main([str(copy), str(tmp_path / "other.pt")])


def test_a_sweep_names_the_controllers_of_all_its_jobs_in_order(tmp_path: Path) -> None:
    for job in (10, 9, 0):
        (tmp_path / f"sweep/{job}/.hydra").mkdir(parents=True)
        (tmp_path / f"sweep/{job}/.hydra/config.yaml").touch()
    assert resolve_checkpoint_paths([f"ckpt={tmp_path}/sweep"]) == [f"ckpt=['{tmp_path}/sweep']"]  # only many runs
    (tmp_path / "sweep/multirun.yaml").touch()
    inside = ",".join(f"'{tmp_path}/sweep/{job}'" for job in (0, 9, 10))
    assert resolve_checkpoint_paths([f"ckpt={tmp_path}/sweep"]) == [f"ckpt=[{inside}]"]
    assert resolve_checkpoint_paths([f"ckpt={tmp_path}/sweep/9"]) == [f"ckpt=['{tmp_path}/sweep/9']"]
    with pytest.raises(ValueError, match=r"ckpt=a,b: several checkpoints are written as a list, ckpt=\[A,B\]\.$"):
        resolve_checkpoint_paths(["ckpt=a,b"])


def test_the_controllers_that_come_with_esper_are_small_and_plain_and_differ_in_their_seed(layout: Layout) -> None:
    names = [name for name in PRETRAINED if name.removeprefix("pretrained/").isdigit()]
    assert find_checkpoint("pretrained") == find_checkpoint("pretrained/0")
    assert sum(find_checkpoint(name).stat().st_size for name in PRETRAINED if name != "pretrained") < LIMIT
    assert set(torch.load(find_checkpoint("pretrained"), weights_only=True)) == {"esper", "state_dict"}
    learners = load_controllers(names, layout)
    assert [f"pretrained/{learner.about['seed']}" for learner in learners] == names
    assert len({learner.training_digest for learner in learners}) == 1  # repetitions of one another
    trained = [
        torch.load(find_checkpoint(name), weights_only=True)["esper"]["origin"]["config"]["ppo"] for name in names
    ]
    today = OmegaConf.to_container(compose_config("run", ["+experiment=cifar_ppo"]).ppo, resolve=False)
    assert trained == [today] * len(names)
    rounds = torch.load(find_checkpoint("pretrained"), weights_only=True)["esper"]["origin"]["rounds"]
    assert min(line["losses/explained_variance"] for line in rounds[-7:]) > 0.5


def test_a_controller_that_comes_with_esper_plays_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    monkeypatch.chdir(tmp_path)
    for job in range(2):  # a sweep of the same name
        (tmp_path / f"pretrained/{job}/.hydra").mkdir(parents=True)
        (tmp_path / f"pretrained/{job}/.hydra/config.yaml").touch()
    (tmp_path / "pretrained/multirun.yaml").touch()
    assert resolve_checkpoint_paths(["ckpt=pretrained"]) == ["ckpt=['pretrained']"]
    assert "+experiment=cifar_ppo" in add_task_overrides(["ckpt=pretrained"])
    learner = load_controller("pretrained", layout)
    assert learner.label == "pretrained"
    assert learner.about["trained_on"] == "cifar_blind on cifar10"
    assert learner.about["gflops"] > 0
    evaluated(tmp_path / "out", "controllers=[ppo]", "episodes=2", "ckpt=pretrained")
    lines = list(read_lines(tmp_path / "out/episodes.jsonl"))
    assert {line["checkpoint"] for line in lines} == {"pretrained"}
    assert all(step["action"]["op"] in step["legal"] for line in lines for step in line["steps"])
    assert any(step["action"]["op"] == "GERMINATE" for line in lines for step in line["steps"])


def test_a_run_begins_with_what_another_has_learned_but_its_own_critic(
    run: Path, tmp_path: Path, layout: Layout
) -> None:
    own = ("host=cifar_baseline", "seed=1", "policy.hidden=16")
    config = compose_config("run", [*TASK, *own, f"start={run}"])
    policy = build_module(config, build_environment(config)).policy
    first = {key: value.clone() for key, value in policy.state_dict().items()}
    load_start_weights(str(run), policy)
    learned = load_controller(str(run), layout).policy.state_dict()
    for key, value in policy.state_dict().items():
        assert torch.equal(value, (first if key.startswith("critic.") else learned)[key]), key
    assert policy.base_statistics.count > 0  # no warm-up is wanted

    further = trained(tmp_path / "further", *own, f"start={run}")
    before, after = (load_controller(str(path), layout).about for path in (run, further))
    assert after["episodes"] == 2 * before["episodes"]
    assert after["gflops"] > before["gflops"]
    assert load_controller(str(kept(further, tmp_path / "kept.pt")), layout).about["gflops"] == after["gflops"]
    went_on = compose_config("run", [*TRAINED, *own, f"start={run}", "rounds=3"])
    shutil.copytree(further, tmp_path / "longer")
    train(went_on, tmp_path / "longer", Console(quiet=True), [])
    longer = load_controller(str(tmp_path / "longer"), layout).about
    assert longer["episodes"] == after["episodes"] + 3
    assert longer["gflops"] > after["gflops"]


def test_a_resumed_run_goes_on_from_its_own_weights_and_not_from_its_start(run: Path, tmp_path: Path) -> None:
    overrides = (*TRAINED, "seed=1", f"start={run}")
    further = trained(tmp_path / "further", "seed=1", f"start={run}")
    saved = torch.load(further / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    train(compose_config("run", overrides), further, Console(quiet=True), [])  # nothing is left to do
    again = torch.load(further / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(again[key], value) for key, value in saved.items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["start=nowhere"],
            r"^start=nowhere: must be a checkpoint, the directory of a run, or pretrained; there is no",
        ),
        (["start=[pretrained]"], r"^start=\['pretrained'\]: must name one trained controller, or be null\.$"),
        (["policy.hidden=8"], r"^start=.*: has another network than is asked for; it has policy\.hidden=16\.$"),
        (
            ["slots.names=[block1]"],
            r"^start=.*: was trained with the 3 slots block1, block2, block3, but here are the 1",
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
