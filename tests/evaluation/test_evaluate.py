import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from esper.config import build_environment, check
from esper.evaluate import check_arms
from esper.evaluate import evaluate as run
from esper.evaluation.summary import interval
from esper.records import read
from tests.environment_kit import SMALL, config, text_config

QUICK = [*SMALL, "environment.steps=6", "episodes=3"]


def evaluate(directory: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "esper.evaluate", *QUICK, f"hydra.run.dir={directory}", *overrides]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_the_command_compares_controllers_on_the_same_episodes(tmp_path: Path) -> None:
    done = evaluate(tmp_path, "controllers=[none,random,schedule,heuristic]")
    assert done.returncode == 0, done.stderr
    for name in ("none", "random", "schedule", "heuristic"):
        assert name in done.stdout
    episodes = list(read(tmp_path / "episodes.jsonl"))
    assert len(episodes) == 12
    seeds = {name: [e["seed"] for e in episodes if e["controller"] == name] for name in ("none", "random")}
    assert seeds["none"] == seeds["random"]
    assert len(set(seeds["none"])) == 3
    assert episodes[0]["data"] == "synthetic_images"
    assert episodes[0]["config"]["environment"]["steps"] == 6
    summary = json.loads((tmp_path / "evaluation.json").read_text())["controllers"]
    mean = sum(e["score"] for e in episodes if e["controller"] == "none") / 3
    assert summary["none"]["score"] == pytest.approx(mean)
    with Image.open(tmp_path / "timeline.png") as picture:
        assert picture.size[0] > 1000

    again = tmp_path / "again"
    source = next(index for index, e in enumerate(episodes) if e["controller"] == "random")
    replay = [
        f"replay.records={tmp_path}/episodes.jsonl",
        f"replay.line={source}",
        "episodes=1",
        "controllers=[replay]",
    ]
    assert evaluate(again, *replay).returncode == 0
    (repeated,) = read(again / "episodes.jsonl")
    assert repeated["score"] == episodes[source]["score"]  # the same seed, the same actions


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path) -> None:
    overrides = [
        "episodes=1",
        "environment.envs=1",
        "controllers=[none,random]",
        "environment.batches=40",
        "environment.steps=20",
    ]
    command = [sys.executable, "-m", "esper.evaluate", *SMALL, f"hydra.run.dir={tmp_path}", *overrides]

    def heed_interrupts() -> None:  # a test run in the background of a shell ignores them, and so would its children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, preexec_fn=heed_interrupts, **pipes) as running:
        records = tmp_path / "episodes.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (records.exists() and records.read_text().count("\n")):
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "interrupted; what is finished is kept" in out
    assert [e["controller"] for e in read(records)] == ["none"]
    assert (tmp_path / "evaluation.json").exists()


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
        check(config(*overrides))


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
    check(composed)
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
    with pytest.raises(ValueError, match=r"replay\.records=null: must name an episodes\.jsonl"):
        check_arms(config("controllers=[replay]"))


def test_good_input_passes() -> None:
    check(config("slots.names=[block3,block1]"))
    check(text_config())


def test_the_command_tells_bad_input_without_a_traceback(tmp_path: Path) -> None:
    done = evaluate(tmp_path, "controllers=[none,oracle]")
    assert done.returncode == 1
    assert done.stderr.strip().startswith("controllers: oracle is unknown; there are none, random, schedule, heuristic")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("override", ["episodes=0", "controllers=[]"])
def test_nothing_to_compare_is_refused(override: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be at least one each"):
        run(config(override), tmp_path, Console())


def test_the_interval_of_a_mean_covers_it_and_shrinks_with_more_values() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert 1 < low < 2.5 < high < 4
    wider = interval([1.0, 2.0, 3.0, 4.0] * 25)
    assert low < wider[0] < wider[1] < high
    assert interval([2.0]) == (2.0, 2.0)
