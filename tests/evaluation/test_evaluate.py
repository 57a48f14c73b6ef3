"""The command, typed as a user would."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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
from esper.evaluation.selection import check_arms
from esper.growth import load_grown
from esper.records import read_lines
from tests.evaluation.fixtures_episodes import TASK, evaluated, trained
from tests.fixtures_environment import SMALL, config, text_config

QUICK = [*SMALL, "environment.steps=6", "episodes=3"]


def heed_interrupts() -> None:  # a test run in the background of a shell ignores them, and so would its children
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*overrides: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "esper.evaluate", *overrides]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, preexec_fn=heed_interrupts, env=environment, **pipes)


def typed(where: Path, *overrides: str) -> None:
    """The command in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(sys, "argv", ["esper.evaluate", *overrides])
        handler = signal.getsignal(signal.SIGTERM)
        try:
            cli()
        finally:
            signal.signal(signal.SIGTERM, handler)


def refused(where: Path, *overrides: str) -> str:
    with pytest.raises(SystemExit) as error:
        typed(where, *overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def wait_for(records: Path, lines: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (records.exists() and records.read_text().count("\n") >= lines):
        time.sleep(0.02)


def without_clock(path: Path) -> list[EpisodeRecord]:
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "config")} for line in read_lines(path)
    ]


def test_the_command_compares_controllers_on_the_same_episodes(tmp_path: Path) -> None:
    with start(*QUICK, f"hydra.run.dir={tmp_path}/a", "controllers=[none,random]") as running:
        out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert "cifar_baseline on synthetic_images, test split" in out
    episodes = list(read_lines(tmp_path / "a/episodes.jsonl"))
    assert len(episodes) == 6
    seeds = {name: [e["episode_seed"] for e in episodes if e["arm"] == name] for name in ("none", "random")}
    assert seeds["none"] == seeds["random"]
    assert len(set(seeds["none"])) == 3
    assert episodes[0]["data"] == "synthetic_images"
    assert episodes[0]["config"]["environment"]["steps"] == 6
    found = json.loads((tmp_path / "a/evaluation.json").read_text())
    (figures,) = found["tasks"].values()
    mean = sum(e["score"] for e in episodes if e["arm"] == "none") / 3
    assert figures["none"]["score"]["value"] == pytest.approx(mean)
    text = (tmp_path / "a/report.md").read_text()
    assert f"python -m esper.evaluate {' '.join(QUICK[:1])}" in text
    assert "controllers=[none,random]" in text

    source = next(index for index, e in enumerate(episodes) if e["arm"] == "random")
    replay = [
        f"replay.records={tmp_path}/a/episodes.jsonl",
        f"replay.line={source}",
        "episodes=1",
        "controllers=[replay]",
    ]
    typed(tmp_path, *SMALL, "environment.steps=6", "hydra.run.dir=again", *replay)
    (repeated,) = read_lines(tmp_path / "again/episodes.jsonl")
    assert repeated["score"] == episodes[source]["score"]  # the same seed, the same actions


def test_an_interrupt_keeps_what_is_finished_and_a_resume_plays_the_rest_once(tmp_path: Path) -> None:
    overrides = [
        *SMALL, "episodes=2", "environment.envs=1", "controllers=[none,random]", "environment.batches=40",
        "environment.steps=4",
    ]  # fmt: skip
    records = tmp_path / "cut/episodes.jsonl"
    with start(*overrides, f"hydra.run.dir={tmp_path}/cut") as running:
        wait_for(records, 1)
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "interrupted; what is finished is kept" in out
    assert f"resume={tmp_path}/cut" in out
    before = records.read_text()
    assert 1 <= before.count("\n") < 4
    assert (tmp_path / "cut/report.html").exists()
    assert f"Incomplete: {before.count(chr(10))} of 4 episodes have been played." in out
    with records.open("a") as file:
        file.write("no JSON\n" + before[:100])  # as a machine that dies might leave it
    typed(tmp_path, f"resume={tmp_path}/cut")
    after = records.read_text()
    assert after.startswith(before)
    whole = [line for line in after.splitlines() if line != "no JSON"]
    assert len(whole) == 4
    text = (tmp_path / "cut/report.md").read_text()
    assert f"line {before.count(chr(10)) + 1} is no JSON; it is left out." in text

    typed(tmp_path, *overrides, f"hydra.run.dir={tmp_path}/whole")
    records.write_text("".join(f"{line}\n" for line in whole))
    assert without_clock(records) == without_clock(tmp_path / "whole/episodes.jsonl")

    typed(tmp_path, f"resume={tmp_path}/whole", "episodes=3", "controllers=[none,schedule]")
    played = [(line["arm"], line["episode_seed"]) for line in read_lines(tmp_path / "whole/episodes.jsonl")]
    assert len(played) == len(set(played)) == 4 + 1 + 3
    assert "Incomplete" not in (tmp_path / "whole/report.md").read_text()
    sentence = refused(tmp_path, f"resume={tmp_path}/whole", "host=cifar_blind")
    assert "a resumed evaluation keeps its host." in sentence
    sentence = refused(tmp_path, *overrides, f"hydra.run.dir={tmp_path}/whole")
    assert "holds an evaluation already; go on with resume=" in sentence
    assert "is no run's directory" in refused_run(f"{tmp_path}/whole")


def refused_run(directory: str) -> str:
    with pytest.raises(SystemExit) as error:
        find_run(directory, RUN)
    return str(error.value)


BAD = {
    ("slots.names=[block9]",): "slots.names: block9 is no slot of this host; it has block1, block2, block3.",
    ("slots.names=[]",): "slots.names=[]: must name at least one of block1, block2, block3, or be null for all.",
    ("slots.blueprints=[lora]",): "blueprint=lora: is unknown among cnn blueprints; allowed are norm, attention",
    ("environment.batch=401",): "environment.batch=401: is larger than data.train=400.",
    ("environment.steps=0",): "environment.steps=0: must be a whole number of at least 1.",
    ("environment.steps=abc",): "environment.steps=abc: must be a whole number of at least 1.",
    ("device=cuda",): "device=cuda: there is no CUDA device here; cpu is allowed.",
    ("slots.blueprints=[]",): "slots.blueprints=[]: must name at least one, or be null",
    (
        "+reward.terms.bonus._target_=esper.rewards.terms.Bonus",
    ): "reward.terms.bonus: esper.rewards.terms.Bonus is unknown",
    ("reward.terms.shaping.gamma=0.9",): "reward.terms.shaping.gamma=0.9: must be gamma=1.0, which PPO uses.",
    ("host=tinystories_small",): "data: a host of topology transformer needs text; choose another data set or host.",
}


@pytest.mark.parametrize(("overrides", "sentence"), BAD.items())
def test_bad_input_is_refused_in_one_sentence_before_anything_is_built(
    overrides: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.data.synthetic.images", None)  # no data may be loaded
    with pytest.raises(ValueError, match="^" + sentence.replace("[", r"\[").replace(".", r"\.")):
        check_config(config(*overrides))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("+environment.foo=1",), r"esper\.environment\.Environment: foo is no setting of it; the nearest is"),
        (
            ("+reward.terms.bonus._target_=esper.rewards.terms.Rent",),
            r"missing 1 required positional argument: 'weight'",
        ),
        (("+reward.terms.bonus._target_=esper.rewards.terms2.Rent",), r"esper\.rewards\.Reward: "),
    ],
)
def test_what_cannot_be_built_is_told_in_one_sentence(overrides: tuple[str, ...], sentence: str) -> None:
    composed = config(*overrides)
    check_config(composed)
    with pytest.raises(ValueError, match=sentence) as caught:
        build_environment(composed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"), [("", "holds no episodes"), ('{"a": 1}\n', "line 0 is no episode record")]
)
def test_a_replay_without_an_episode_is_refused(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text(content)
    composed = config("controllers=[replay]", f"replay.records={tmp_path}/e.jsonl")
    with pytest.raises(ValueError, match=sentence):
        check_arms(composed)


def test_good_input_passes() -> None:
    check_config(config("slots.names=[block3,block1]"))
    check_config(text_config())


ARM_ERRORS = {
    ("controllers=[none,oracle]",): "controllers: oracle is unknown; there are none, static_final, static_final_flops",
    ("episodes=0",): "episodes=0: must be a whole number of at least 1.",
    ("controllers=[]",): "controllers=[]: must name at least one of none, static_final",
    ("controllers=[ppo]",): "ckpt=null: must name a checkpoint or a run's directory for the arm ppo.",
    ("controllers=[replay]", "episodes=1"): "episodes=1: must be at least 2 for the arm replay.",
    ("controllers=[best_open_loop]",): "schedules=null: must be a number for best_open_loop, where no ckpt says",
    ("schedules=0",): "schedules=0: must be a whole number of at least 1, or null.",
    ("reference=replay",): "reference=replay: must be one of none, all_seeds, schedule",
    ("ckpt=[]", "controllers=[ppo]"): "ckpt=[]: must name a checkpoint or a run's directory for the arm ppo.",
    ("replay.records=x", "replay.line=abc", "controllers=[replay]"): "replay.line=abc: must be a whole number.",
    ("ckpt=nowhere",): "ckpt=nowhere: must be a checkpoint, the directory of a run, or pretrained; there",
    ("export=ppo",): "export=ppo: must be best, one of the arms that are played (none, random, schedule, heuristic",
    ("export=-1",): "export=-1: must be best, one of the arms",
}


@pytest.mark.parametrize(("overrides", "sentence"), ARM_ERRORS.items())
def test_what_cannot_be_compared_is_refused_before_anything_is_built(
    overrides: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.data.synthetic.images", None)  # no data may be loaded
    with pytest.raises(ValueError, match="^" + re.escape(sentence)):
        check_arms(config(*overrides))


def test_a_refused_evaluation_leaves_nothing(tmp_path: Path) -> None:
    sentence = refused(tmp_path, *SMALL, "controllers=[oracle]", "hydra.run.dir=out")
    assert sentence.startswith("controllers: oracle is unknown")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"))


def test_a_checkpoint_brings_its_task_and_may_be_tried_on_another(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["episodes=1", "controllers=[ppo]", f"ckpt={checkpoint}"]
    typed(tmp_path, *few, "hydra.run.dir=own")
    (own,) = read_lines(tmp_path / "own/episodes.jsonl")
    assert own["host_parameters"] == 3_482  # cifar_blind, as it was trained
    assert own["host"] == "cifar_blind"
    assert len(own["steps"]) == 8
    assert own["checkpoint"] == str(checkpoint / "checkpoints/last.ckpt")
    text = (tmp_path / "own/report.md").read_text()
    assert "python -m esper.run data=synthetic_images" in text
    assert "| 2 | 6 |" in text  # rounds and episodes it was trained for

    assert "Transfer" not in text
    capsys.readouterr()
    typed(tmp_path, *few, "hydra.run.dir=other", "host=cifar_baseline")
    (other,) = read_lines(tmp_path / "other/episodes.jsonl")
    assert other["host_parameters"] == 6_418
    assert len(other["steps"]) == 8
    transfer = "learned on another task than is played here (host.channels: 16 -> 8; host.kernel: 1 -> 3)"
    assert transfer in (tmp_path / "other/report.md").read_text()
    told = capsys.readouterr().out
    assert transfer in told
    assert "ppo after 2 rounds" in told


def test_a_policy_acts_as_did_better_on_held_out_episodes(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run)
    layout = build_environment(compose_config("evaluate", TASK)).layout
    rounds = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for greedy, sampled, expected in ((40.0, 30.0, True), (30.0, 40.0, False), (None, None, False)):
        rounds[-1] |= {"validation/greedy_score": greedy, "validation/sampled_score": sampled}
        (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
        assert load_controller(str(run), layout).about["greedy"] is expected
    few = ["episodes=1", "controllers=[ppo]", f"ckpt={run}"]
    evaluated(tmp_path / "out", *few)
    evaluated(tmp_path / "out", *few, "controller.ppo.greedy=true")
    drawn, likeliest = read_lines(tmp_path / "out/episodes.jsonl")
    assert drawn["inputs_digest"] != likeliest["inputs_digest"]


def test_a_relative_checkpoint_is_found_again_from_elsewhere(checkpoint: Path, tmp_path: Path) -> None:
    typed(
        checkpoint.parent, "episodes=1", "controllers=[ppo]", f"ckpt={checkpoint.name}", f"hydra.run.dir={tmp_path}/a"
    )
    typed(tmp_path, f"resume={tmp_path}/a", "episodes=2")
    assert len(list(read_lines(tmp_path / "a/episodes.jsonl"))) == 2


def test_several_checkpoints_are_several_trained_controllers(checkpoint: Path, tmp_path: Path) -> None:
    other = trained(tmp_path / "other", "seed=1")
    found = evaluated(tmp_path / "both", f"ckpt=[{checkpoint},{other}]", "controllers=[none,ppo]", "episodes=2")
    (figures,) = found.values()
    assert (figures["ppo"]["controllers"], figures["ppo"]["seeds"]) == (2, 2)
    assert (figures["none"]["controllers"], figures["none"]["seeds"]) == (1, 2)
    longer = trained(tmp_path / "longer", "seed=1", "ppo.epochs=2")
    three = f"ckpt=[{checkpoint},{other},{longer}]"
    (figures,) = evaluated(tmp_path / "three", three, "controllers=[ppo,replay]", "episodes=2").values()
    found = {name: arm["controllers"] for name, arm in figures.items()}
    assert found == {"ppo": 2, "ppo (2)": 1, "replay": 2, "replay (2)": 1}, "what is made from unlike ones is unlike"
    assert "but arms of their own in the order of ckpt: ppo, ppo (2)." in (tmp_path / "three/report.md").read_text()
    once = f"ckpt=[{checkpoint}/checkpoints/last.ckpt,{checkpoint}/checkpoints/best.ckpt]"
    with pytest.raises(ValueError, match=r"are of one run; each must be a controller of its own\.$"):
        evaluated(tmp_path / "once", once)


def test_episodes_whose_making_has_changed_are_played_again(checkpoint: Path, tmp_path: Path) -> None:
    arms = ["controllers=[schedule,fragrow,static_final]", "episodes=2"]
    evaluated(tmp_path, *arms, "reference=schedule")
    first = list(read_lines(tmp_path / "episodes.jsonl"))
    evaluated(tmp_path, *arms, "reference=fragrow")
    second = list(read_lines(tmp_path / "episodes.jsonl"))
    assert second[: len(first)] == first
    new = second[len(first) :]
    assert [line["arm"] for line in new] == ["static_final"] * 2
    ended = {line["episode_seed"]: line["fossils"] for line in first if line["arm"] == "fragrow"}
    assert {line["episode_seed"]: line["fossils"] for line in new} == ended
    (figures,) = json.loads((tmp_path / "evaluation.json").read_text())["tasks"].values()
    assert figures["static_final"]["episodes"] == 2
    evaluated(tmp_path, *arms, "reference=fragrow")
    assert list(read_lines(tmp_path / "episodes.jsonl")) == second

    with pytest.raises(ValueError, match="is no episode that this evaluation plays"):  # of the first reference
        evaluated(tmp_path, *arms, "reference=fragrow", f"export={len(first) - 1}")


def test_a_reference_that_is_named_is_played_and_what_is_made_from_nothing_is_remarked(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[static_final]", "reference=none", "episodes=2", "export=best")
    lines = list(read_lines(tmp_path / "episodes.jsonl"))
    assert [line["arm"] for line in lines] == ["none"] * 2 + ["static_final"] * 2
    assert "none kept no seed in 2 of 2 episodes" in (tmp_path / "report.md").read_text()
    evaluated(tmp_path / "other", "controllers=[none]", "reference=random", "episodes=1")
    assert {line["arm"] for line in read_lines(tmp_path / "other/episodes.jsonl")} == {"none", "random"}


def test_the_best_network_to_export_is_one_that_grew(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[all_seeds,schedule]", "episodes=1", "export=best")
    network = load_grown(next(tmp_path.glob("grown_*.pt")))
    assert network.about["controller"] == "schedule"
    with pytest.raises(ValueError, match=r"^export=2: must be below the 2 episodes that are played\.$"):
        evaluated(tmp_path / "other", "controllers=[all_seeds,schedule]", "episodes=1", "export=2")


def test_hosts_that_are_drawn_are_tasks_of_their_own_and_a_timetable_is_tried_on_each(tmp_path: Path) -> None:
    evaluated(tmp_path, "host=cifar_mixed", "controllers=[none,best_open_loop]", "schedules=4", "episodes=4")
    tried = list(read_lines(tmp_path / "search.jsonl"))
    assert [line["host"] for line in tried] == ["cifar_blind", "cifar_baseline"] * 2
    grown = [[s["action"] for s in line["steps"] if s["action"]["op"] == "GERMINATE"] for line in tried]
    assert grown[0::2] == grown[1::2]  # the same timetable
    assert grown[0] != grown[2]
    lines = list(read_lines(tmp_path / "episodes.jsonl"))
    assert {line["host"] for line in lines} == {"cifar_blind", "cifar_baseline"}
    text = (tmp_path / "report.md").read_text()
    assert "best of 2 timetables, each on 2 hosts, whose search" in text
    assert "cifar_blind on synthetic_images, test split: Results" in text
    assert "The mean over tasks of each task's interquartile mean" in text


def test_a_searched_timetable_can_be_the_reference(tmp_path: Path) -> None:
    evaluated(tmp_path, "controllers=[replay]", "reference=best_open_loop", "schedules=3", "episodes=2")
    lines = list(read_lines(tmp_path / "episodes.jsonl"))
    assert [line["arm"] for line in lines] == ["best_open_loop"] * 2 + ["replay"] * 2
    assert "best_open_loop is the best of 3 timetables" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["actions=full"], "was trained with op of WAIT, GERMINATE, PRUNE, FOSSILIZE, but here"),
        (
            ["slots.names=[block1,block2]"],
            "was trained with the 3 slots block1, block2, block3, but here are the 2 slots",
        ),
        (["slots.blueprints=[norm]"], "was trained with blueprint of norm, attention"),
    ],
)
def test_a_checkpoint_for_another_action_space_is_refused(
    overrides: list[str], sentence: str, checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^ckpt=.*last\.ckpt: ") as caught:
        evaluated(tmp_path, f"ckpt={checkpoint}", *overrides)
    assert sentence in str(caught.value)


def test_text_is_compared_in_bits_per_byte_and_says_what_embeddings_hold(tmp_path: Path) -> None:
    arms = ["controllers=[all_seeds,host_flops]", "reference=all_seeds", "episodes=2", "environment.steps=2"]
    evaluate(text_config(*arms, "export=best"), tmp_path, Console(quiet=True))
    lines = list(read_lines(tmp_path / "episodes.jsonl"))
    assert {line["arm"] for line in lines} == {"all_seeds", "host_flops"}
    assert all(line["score"] < 0 for line in lines)
    assert lines[0]["embedding_parameters"] == (257 + 16) * 16
    assert lines[0]["fossils"]["segment1"] == ["mlp_small", "ADD"]
    text = (tmp_path / "report.md").read_text()
    assert "Score = -100 x bits per byte on the test split" in text
    assert "4,368 are embeddings of the host" in text
    network = load_grown(next(tmp_path.glob("grown_*.pt")))
    tokens = from_state(network.about["data"]["tokenizer"]).encode(["Once"])
    assert network(torch.tensor(tokens)).shape == (1, 4, 257)


def test_the_help_names_every_arm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        typed(tmp_path, "--help")
    told = capsys.readouterr().out
    assert all(arm in told for arm in ARMS)
    assert "python -m esper.evaluate resume=latest" in told
