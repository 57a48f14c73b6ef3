"""python -m esper.evaluate, as a user types it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper.checkpoints import load_controller
from esper.checkpoints.resume import RUN, find_run
from esper.config import build_environment, check_config, compose_config
from esper.data.tokens import from_state
from esper.evaluate import cli
from esper.evaluation.arms import ARMS
from esper.evaluation.run import evaluate
from esper.evaluation.selection import check_arms, selected_arms
from esper.growth import load_grown
from esper.records import EpisodeRecord
from tests.evaluation.fixtures_episodes import TASK, evaluated, load_episodes, make_episode, trained, write_episodes
from tests.fixtures_environment import SMALL, config, text_config
from tests.fixtures_process import TIMEOUT, CommandProcess

QUICK = [*SMALL, "environment.steps=6", "episodes=3"]
BUDGET = ("environment=budget", "environment.batches=null", "environment.budget=1")


def run_command(where: Path, *overrides: str) -> None:
    """Run the command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(sys, "argv", ["esper.evaluate", *overrides])
        handler = signal.getsignal(signal.SIGTERM)
        try:
            cli()
        finally:
            signal.signal(signal.SIGTERM, handler)


def error_of(where: Path, *overrides: str) -> str:
    """The one sentence that the command ends with."""
    with pytest.raises(SystemExit) as error:
        run_command(where, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def without_seconds(path: Path) -> list[EpisodeRecord]:
    return [replace(episode, seconds=None, config={}) for episode in load_episodes(path)]


def test_the_command_compares_controllers_on_the_same_episodes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "esper.evaluate", *QUICK, f"hydra.run.dir={tmp_path}/a"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "controllers=[none,random]"], env=environment, timeout=TIMEOUT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "cifar_baseline on synthetic_images, test split" in done.stdout
    episodes = load_episodes(tmp_path / "a/episodes.jsonl")
    assert len(episodes) == 6
    seeds = {name: [e.episode_seed for e in episodes if e.arm == name] for name in ("none", "random")}
    assert seeds["none"] == seeds["random"]
    assert len(set(seeds["none"])) == 3
    assert episodes[0].data == "synthetic_images"
    assert episodes[0].config["environment"]["steps"] == 6
    (results,) = json.loads((tmp_path / "a/evaluation.json").read_text())["tasks"].values()
    mean = sum(e.score for e in episodes if e.arm == "none") / 3
    assert results["none"]["score"]["value"] == pytest.approx(mean)
    text = (tmp_path / "a/report.md").read_text()
    assert f"python -m esper.evaluate {' '.join(QUICK[:1])}" in text
    assert "controllers=[none,random]" in text

    source = next(index for index, e in enumerate(episodes) if e.arm == "random")
    replay = [
        f"replay.records={tmp_path}/a/episodes.jsonl",
        f"replay.line={source}",
        "episodes=1",
        "controllers=[replay]",
    ]
    run_command(tmp_path, *SMALL, "environment.steps=6", "hydra.run.dir=again", *replay)
    (repeated,) = load_episodes(tmp_path / "again/episodes.jsonl")
    assert repeated.score == episodes[source].score  # the same episode seed, the same actions


def test_finished_episodes_survive_an_interrupt_and_a_resume_runs_the_rest_once(tmp_path: Path) -> None:
    overrides = [
        *SMALL, "episodes=2", "environment.envs=1", "controllers=[none,random]", "environment.batches=2",
        "environment.steps=4",
    ]  # fmt: skip
    records = tmp_path / "cut/episodes.jsonl"
    arguments = (*overrides, f"hydra.run.dir={tmp_path}/cut")
    running = CommandProcess(
        "esper.evaluate", *arguments, directory=tmp_path, output=tmp_path / "output.txt", is_interrupted=True
    )
    out = running.finish()
    assert "interrupted; finished episodes are saved; resume with" in out
    assert f"resume={tmp_path}/cut" in out
    before = records.read_text()
    assert before.count("\n") == 1
    assert (tmp_path / "cut/report.html").exists()
    assert f"Incomplete: {before.count(chr(10))} of 4 episodes are finished." in out
    with records.open("a") as file:
        file.write("no JSON\n" + before[:100])  # as after a crash
    run_command(tmp_path, f"resume={tmp_path}/cut")
    after = records.read_text()
    assert after.startswith(before)
    complete = [line for line in after.splitlines() if line != "no JSON"]
    assert len(complete) == 4
    text = (tmp_path / "cut/report.md").read_text()
    assert f"line {before.count(chr(10)) + 1} is not JSON; it is left out." in text

    run_command(tmp_path, *overrides, f"hydra.run.dir={tmp_path}/whole")
    records.write_text("".join(f"{line}\n" for line in complete))
    assert without_seconds(records) == without_seconds(tmp_path / "whole/episodes.jsonl")

    run_command(tmp_path, f"resume={tmp_path}/whole", "episodes=3", "controllers=[none,schedule]")
    episodes = [(episode.arm, episode.episode_seed) for episode in load_episodes(tmp_path / "whole/episodes.jsonl")]
    assert len(episodes) == len(set(episodes)) == 4 + 1 + 3
    assert "Incomplete" not in (tmp_path / "whole/report.md").read_text()
    sentence = error_of(tmp_path, f"resume={tmp_path}/whole", "host=cifar_blind")
    assert "a resumed evaluation keeps its host." in sentence
    sentence = error_of(tmp_path, *overrides, f"hydra.run.dir={tmp_path}/whole")
    assert f"must be a directory without an evaluation; resume={tmp_path}/whole continues it." in sentence
    assert "must be latest or the directory of the run to resume" in error_of_resumed_run(f"{tmp_path}/whole")


def error_of_resumed_run(directory: str) -> str:
    with pytest.raises(SystemExit) as error:
        find_run(directory, RUN)
    return str(error.value)


CONFIG_ERRORS = {
    ("slots.names=[block9]",): "slots.names: block9 is not a slot of this host; it has block1, block2, block3.",
    ("slots.names=[]",): "slots.names=[]: must name at least one of block1, block2, block3, or be null for all.",
    ("slots.blueprints=[lora]",): "blueprint=lora: is unknown among cnn blueprints; allowed are norm, attention",
    ("environment.batch=401",): "environment.batch=401: must be at most data.train=400.",
    ("environment.steps=0",): "environment.steps=0: must be a whole number of at least 1.",
    ("environment.steps=abc",): "environment.steps=abc: must be a whole number of at least 1.",
    ("device=cuda",): "device=cuda: there is no CUDA device here; cpu is allowed.",
    ("slots.blueprints=[]",): "slots.blueprints=[]: must name at least one, or be null",
    (
        "+reward.terms.bonus._target_=esper.rewards.terms.Bonus",
    ): "reward.terms.bonus._target_=esper.rewards.terms.Bonus: there is no such class or function; the nearest",
    ("reward.terms.shaping.gamma=0.9",): "reward.terms.shaping.gamma=0.9: must be gamma=1.0, which PPO uses.",
    (
        "host=tinystories_small",
    ): "data: must be text for a host of topology transformer; choose another data set or host.",
}


@pytest.mark.parametrize(("overrides", "sentence"), CONFIG_ERRORS.items())
def test_an_invalid_configuration_is_refused_before_anything_is_built(
    overrides: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.data.synthetic._make_images", None)  # no data may be loaded
    with pytest.raises(ValueError, match="^" + sentence.replace("[", r"\[").replace(".", r"\.")):
        check_config(config(*overrides))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ("+environment.foo=1",),
            r"^environment\.foo: is not an argument of esper\.environment\.Environment; the nearest is",
        ),
        (
            ("+reward.terms.bonus._target_=esper.rewards.terms.Rent",),
            r"missing 1 required positional argument: 'weight'",
        ),
        (
            ("+reward.terms.bonus._target_=esper.nowhere.Rent",),
            r"^reward\.terms\.bonus\._target_=.*: cannot be imported",
        ),
    ],
)
def test_a_failure_to_build_is_one_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    composed = config(*overrides)

    def check_and_build() -> None:
        check_config(composed)
        build_environment(composed)

    with pytest.raises(ValueError, match=sentence) as caught:
        check_and_build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"), [("", "has no episodes"), ('{"a": 1}\n', "line 0 is not an episode record")]
)
def test_a_replay_without_an_episode_is_refused(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text(content)
    composed = config("controllers=[replay]", f"replay.records={tmp_path}/e.jsonl")
    with pytest.raises(ValueError, match=sentence):
        check_arms(composed)


def test_a_replay_ignores_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    write_episodes(path, [make_episode()])
    with path.open("a") as file:
        file.write('{"version": 3, ')
    check_arms(config("controllers=[replay]", f"replay.records={path}"))
    with pytest.raises(ValueError, match=r"^replay\.line=1: must be between 0 and 0\.$"):
        check_arms(config("controllers=[replay]", f"replay.records={path}", "replay.line=1"))


def test_valid_configurations_pass() -> None:
    check_config(config("slots.names=[block3,block1]"))
    check_config(text_config())


ARM_ERRORS = {
    ("controllers=[none,wizard]",): "controllers: wizard is unknown; must be of none, full, static_final, static_final",
    ("controllers=[]",): "controllers=[]: must name at least one of none, full, static_final",
    ("controllers=[grow_once]",): "controllers: grow_once needs a budget of FLOPs; environment=budget sets one.",
    ("controllers=[best_static@4]",): "controllers: best_static@4 needs a budget of FLOPs; environment=budget sets",
    ("controllers=[net2net@0.5]",): "controllers: net2net@0.5 needs a budget of FLOPs; environment=budget sets one.",
    (*BUDGET, "controllers=[all_seeds]"): "controllers: all_seeds exists without a budget of FLOPs only; use full.",
    (*BUDGET, "controllers=[host_flops]"): "controllers: host_flops exists without a budget of FLOPs only; use none.",
    (
        *BUDGET,
        "controllers=[static_final_flops]",
    ): "controllers: static_final_flops exists without a budget of FLOPs only; use static_final.",
    (
        *BUDGET,
        "controllers=[grow_once@1.5]",
    ): "controllers: grow_once@1.5 must have a share of the budget between 0 and 1 after @, such as grow_once@0.25.",
    (
        *BUDGET,
        "controllers=[net2net@soon]",
    ): "controllers: net2net@soon must have a share of the budget between 0 and 1 after @, such as net2net@0.25.",
    (
        *BUDGET,
        "controllers=[best_static@3]",
    ): "controllers: best_static@3 must have a number of budgets of search.budgets before the last after @",
    (
        *BUDGET,
        "controllers=[full@0.5]",
    ): "controllers: full@0.5 must be without a number; best_static, grow_once, net2net take one.",
    (*BUDGET, "controllers=[rival@0.5]"): "controllers: rival@0.5 is unknown; must be of none, none_lr, full",
    (
        *BUDGET,
        "controllers=[best_static]",
        "search.budgets=[]",
    ): "search.budgets=[]: must be numbers of budgets of an episode, at least 1 and ascending, such as [1,4,16].",
    (*BUDGET, "controllers=[best_open_loop]", "search.budgets=[0.5]"): "search.budgets=[0.5]: must be numbers of",
    (*BUDGET, "controllers=[grow_once]", "search.budgets=[4,1]"): "search.budgets=[4, 1]: must be numbers of",
    (
        *BUDGET,
        "controllers=[none_lr]",
        "search.lr_scales=null",
    ): "search.lr_scales=null: must be a list of factors for the arm none_lr.",
    (
        *BUDGET,
        "controllers=[net2net@0.5]",
        "net2net_host=deep1",
    ): "net2net_host=deep1: must be a wider variant of the host; it has wide1.5, wide2, wide3.",
    (*BUDGET, "reference=all_seeds"): "reference=all_seeds: must be one of none, none_lr, full",
    ("controllers=[ppo]",): "ckpt=null: must name a checkpoint or a run's directory for the arm ppo.",
    ("controllers=[replay]", "episodes=1"): "episodes=1: must be at least 2 for the arm replay.",
    ("controllers=[best_open_loop]",): "schedules=null: must be a number for the arm best_open_loop without a ckpt.",
    ("controllers=[none,schedule]", "primary=random"): "primary=random: must be null or one of none.",
    ("primary=schedule",): "primary=schedule: must be null or one of none, random, heuristic, all_seeds.",
    ("reference=replay",): "reference=replay: must be one of none, full, all_seeds, schedule",
    ("ckpt=[]", "controllers=[ppo]"): "ckpt=[]: must name a checkpoint or a run's directory for the arm ppo.",
    ("ckpt=nowhere",): "ckpt=nowhere: must be a checkpoint, the directory of a run, or pretrained; there",
    ("export=ppo",): "export=ppo: must be best, an arm of this evaluation (none, random, schedule, heuristic",
}


@pytest.mark.parametrize(("overrides", "sentence"), ARM_ERRORS.items())
def test_arms_that_cannot_run_are_refused_before_anything_is_built(
    overrides: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.data.synthetic._make_images", None)  # no data may be loaded
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        check_arms(config(*overrides))


def test_a_host_that_cannot_be_widened_has_no_net2net() -> None:
    composed = text_config(*BUDGET, "controllers=[net2net]")
    with pytest.raises(ValueError, match=r"^net2net_host=wide2: must be a wider variant of the host; it has none, as"):
        check_arms(composed)
    assert "net2net" not in selected_arms(text_config(*BUDGET, "controllers=rules"))
    assert "net2net" in selected_arms(config(*BUDGET, "controllers=rules"))


def test_a_refused_evaluation_leaves_no_directory(tmp_path: Path) -> None:
    sentence = error_of(tmp_path, *SMALL, "controllers=[wizard]", "hydra.run.dir=out")
    assert sentence.startswith("controllers: wizard is unknown")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"))


def test_a_checkpoint_has_its_own_task_and_can_run_on_another(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["episodes=1", "controllers=[ppo]", f"ckpt={checkpoint}"]
    run_command(tmp_path, *few, "hydra.run.dir=own")
    (own,) = load_episodes(tmp_path / "own/episodes.jsonl")
    assert own.host_parameters == 3_482  # cifar_blind, as in training
    assert own.host == "cifar_blind"
    assert len(own.steps) == 8
    assert own.checkpoint == str(checkpoint / "checkpoints/last.ckpt")
    text = (tmp_path / "own/report.md").read_text()
    assert "python -m esper.run data=synthetic_images" in text
    assert "| 2 | 6 |" in text  # rounds and episodes it was trained for

    assert "Transfer" not in text
    capsys.readouterr()
    run_command(tmp_path, *few, "hydra.run.dir=other", "host=cifar_baseline")
    (other,) = load_episodes(tmp_path / "other/episodes.jsonl")
    assert other.host_parameters == 6_418
    assert len(other.steps) == 8
    transfer = "was trained on another task (host.channels: 16 -> 8; host.kernel: 1 -> 3)"
    assert transfer in (tmp_path / "other/report.md").read_text()
    output = capsys.readouterr().out
    assert transfer in output
    assert "ppo after 2 rounds" in output


def test_a_policy_is_greedy_if_that_scored_higher_on_held_out_episodes(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run)
    layout = build_environment(compose_config("evaluate", TASK)).layout
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for greedy, sampled, expected in ((40.0, 30.0, True), (30.0, 40.0, False), (None, None, False)):
        rounds[-1] |= {"validation/greedy_score": greedy, "validation/sampled_score": sampled}
        (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
        assert load_controller(str(run), layout).info.greedy is expected
    few = ["episodes=1", "controllers=[ppo]", f"ckpt={run}"]
    evaluated(tmp_path / "out", *few)
    evaluated(tmp_path / "out", *few, "controller.ppo.greedy=true")
    sampled, greedy = load_episodes(tmp_path / "out/episodes.jsonl")
    assert sampled.inputs_digest != greedy.inputs_digest


def test_a_relative_checkpoint_is_found_from_another_working_directory(checkpoint: Path, tmp_path: Path) -> None:
    run_command(
        checkpoint.parent, "episodes=1", "controllers=[ppo]", f"ckpt={checkpoint.name}", f"hydra.run.dir={tmp_path}/a"
    )
    run_command(tmp_path, f"resume={tmp_path}/a", "episodes=2")
    assert len(load_episodes(tmp_path / "a/episodes.jsonl")) == 2


def test_several_checkpoints_are_several_trained_controllers(checkpoint: Path, tmp_path: Path) -> None:
    other = trained(tmp_path / "other", "seed=1")
    both = f"ckpt=[{checkpoint},{other}]"
    (results,) = evaluated(tmp_path / "both", both, "controllers=[none,ppo]", "episodes=2").values()
    assert (results["ppo"]["controllers"], results["ppo"]["seeds"]) == (2, 2)
    assert (results["none"]["controllers"], results["none"]["seeds"]) == (1, 2)
    longer = trained(tmp_path / "longer", "seed=1", "ppo.epochs=2")
    three = f"ckpt=[{checkpoint},{other},{longer}]"
    (results,) = evaluated(tmp_path / "three", three, "controllers=[ppo,replay]", "episodes=2").values()
    counts = {name: arm["controllers"] for name, arm in results.items()}
    assert counts == {"ppo": 2, "ppo (2)": 1, "replay": 2, "replay (2)": 1}, (
        "arms derived from different controllers are different"
    )
    assert "but separate arms in the order of ckpt: ppo, ppo (2)." in (tmp_path / "three/report.md").read_text()
    once = f"ckpt=[{checkpoint}/checkpoints/last.ckpt,{checkpoint}/checkpoints/best.ckpt]"
    with pytest.raises(ValueError, match=r"are of the same run; each must come from another run\.$"):
        evaluated(tmp_path / "once", once)


def test_episodes_with_changed_inputs_run_again(checkpoint: Path, tmp_path: Path) -> None:
    arms = ["controllers=[schedule,fragrow,static_final]", "episodes=2"]
    evaluated(tmp_path, *arms, "reference=schedule")
    first = load_episodes(tmp_path / "episodes.jsonl")
    evaluated(tmp_path, *arms, "reference=fragrow")
    second = load_episodes(tmp_path / "episodes.jsonl")
    assert second[: len(first)] == first
    new = second[len(first) :]
    assert [episode.arm for episode in new] == ["static_final"] * 2
    ended = {episode.episode_seed: episode.fossils for episode in first if episode.arm == "fragrow"}
    assert {episode.episode_seed: episode.fossils for episode in new} == ended
    (results,) = json.loads((tmp_path / "evaluation.json").read_text())["tasks"].values()
    assert results["static_final"]["episodes"] == 2
    evaluated(tmp_path, *arms, "reference=fragrow")
    assert load_episodes(tmp_path / "episodes.jsonl") == second

    with pytest.raises(ValueError, match="is not part of this evaluation"):  # of the first reference
        evaluated(tmp_path, *arms, "reference=fragrow", f"export={len(first) - 1}")


def test_a_named_reference_runs_and_bare_networks_derived_from_it_are_remarked(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[static_final]", "reference=none", "episodes=2", "export=best")
    episodes = load_episodes(tmp_path / "episodes.jsonl")
    assert [episode.arm for episode in episodes] == ["none"] * 2 + ["static_final"] * 2
    assert "none fossilised no seed in 2 of 2 episodes" in (tmp_path / "report.md").read_text()
    evaluated(tmp_path / "other", "controllers=[none]", "reference=random", "episodes=1")
    assert {episode.arm for episode in load_episodes(tmp_path / "other/episodes.jsonl")} == {"none", "random"}


def test_the_best_network_to_export_is_one_that_grew(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[all_seeds,schedule]", "episodes=1", "export=best")
    network = load_grown(next(tmp_path.glob("grown_*.pt")))
    assert network.about["arm"] == "schedule"
    with pytest.raises(ValueError, match=r"^export=2: must be below the 2 episodes of this evaluation\.$"):
        evaluated(tmp_path / "other", "controllers=[all_seeds,schedule]", "episodes=1", "export=2")


def test_each_sampled_host_is_a_task_and_schedules_are_tried_on_all_hosts(tmp_path: Path) -> None:
    evaluated(tmp_path, "host=cifar_mixed", "controllers=[none,best_open_loop]", "schedules=4", "episodes=4")
    tried = load_episodes(tmp_path / "search.jsonl")
    assert [episode.host for episode in tried] == ["cifar_blind", "cifar_baseline"] * 2
    grown = [[s.action for s in episode.steps if s.action["op"] == "GERMINATE"] for episode in tried]
    assert grown[0::2] == grown[1::2]  # the same schedule
    assert grown[0] != grown[2]
    episodes = load_episodes(tmp_path / "episodes.jsonl")
    assert {episode.host for episode in episodes} == {"cifar_blind", "cifar_baseline"}
    text = (tmp_path / "report.md").read_text()
    assert "best of 2 random schedules, each on 2 hosts; the search took" in text
    assert "cifar_blind on synthetic_images, test split: Results" in text
    assert "The mean over tasks of the interquartile mean of paired differences" in text


def test_best_open_loop_can_be_the_reference(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[replay]", "reference=best_open_loop", "schedules=3", "episodes=2")
    episodes = load_episodes(tmp_path / "episodes.jsonl")
    assert [episode.arm for episode in episodes] == ["best_open_loop"] * 2 + ["replay"] * 2
    assert "best_open_loop is the best of 3 random schedules" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("override", "remark"),
    [
        ("actions=full", "new op: ADVANCE, SET_ALPHA; new head: alpha_curve, alpha_speed, alpha_target, tempo"),
        ("actions=lean lifecycle=quick", "gone op: FOSSILIZE; gone head: blend; new slot option: all"),
        ("slots.names=[block1,block2]", ""),
        ("slots.blueprints=[norm]", "gone blueprint: attention, "),
    ],
)
def test_a_controller_acts_in_another_action_space_and_the_report_lists_what_differs(
    override: str, remark: str, checkpoint: Path, tmp_path: Path
) -> None:
    evaluated(tmp_path, f"ckpt={checkpoint}", "controllers=[ppo]", "episodes=2", *override.split())
    (first, _) = load_episodes(tmp_path / "episodes.jsonl")
    assert len(first.steps) == 8
    text = (tmp_path / "report.md").read_text()
    assert remark in text
    assert ("its weights are mapped by name" in text) is bool(remark)


def test_text_is_scored_in_bits_per_byte_and_embeddings_are_counted(tmp_path: Path) -> None:
    arms = ["controllers=[all_seeds,host_flops]", "reference=all_seeds", "episodes=2", "environment.steps=2"]
    evaluate(text_config(*arms, "export=best"), tmp_path, Console(quiet=True))
    episodes = load_episodes(tmp_path / "episodes.jsonl")
    assert {episode.arm for episode in episodes} == {"all_seeds", "host_flops"}
    assert all(episode.score is not None and episode.score < 0 for episode in episodes)
    assert episodes[0].embedding_parameters == (257 + 16) * 16
    assert episodes[0].fossils["segment1"] == ("mlp_small", "ADD")
    text = (tmp_path / "report.md").read_text()
    assert "Score = -100 x bits per byte on the test split" in text
    assert "4,368 are embeddings of the host" in text
    network = load_grown(next(tmp_path.glob("grown_*.pt")))
    tokens = from_state(network.about["data"]["tokenizer"]).encode(["Once"])
    assert network(torch.tensor(tokens)).shape == (1, 4, 257)


def test_the_help_lists_every_arm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_command(tmp_path, "--help")
    output = capsys.readouterr().out
    assert all(arm in output for arm in ARMS)
    assert "python -m esper.evaluate resume=latest" in output
