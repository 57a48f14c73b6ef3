import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from omegaconf import OmegaConf, open_dict
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper.checkpoints.resume import merge_overrides, resume_arguments, save_config
from esper.checkpoints.runs import read_overrides
from esper.command_line import CONF, move_debug_last
from esper.config import compose_config
from esper.records import read_lines
from esper.run import cli
from esper.training import train
from tests.fixtures_environment import SMALL, SMALL_TEXT
from tests.fixtures_process import TIMEOUT, CommandProcess

pytestmark = pytest.mark.xdist_group("run")  # they share a run

TINY = (
    *SMALL, "host=cifar_blind", "environment.steps=4", "policy.hidden=16", "ppo.epochs=2", "collector.warmup=1",
    "validate_every=2", "name=tiny",
)  # fmt: skip


class RunningProcess(Protocol):
    @property
    def is_running(self) -> bool: ...


def start(directory: Path, *overrides: str) -> CommandProcess:
    output = directory.with_suffix(".txt")  # not in the directory, whose files are compared
    return CommandProcess("esper.run", *overrides, directory=directory, output=output, environment={"COLUMNS": "200"})


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The metrics of a run's rounds, without those that depend on the machine."""
    lines = [json.loads(line) for line in (directory / "rounds.jsonl").read_text().splitlines()]
    machine = ("time/", "health/memory")
    return [{key: value for key, value in line.items() if not key.startswith(machine)} for line in lines]


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of a run's last checkpoint."""
    checkpoint = torch.load(directory / "checkpoints/last.ckpt", weights_only=True)
    moments = checkpoint["optimizer_states"][0]["state"]
    flat = {f"optimizer.{k}.{n}": v for k, state in moments.items() for n, v in state.items()}
    return {**checkpoint["state_dict"], **flat}


def wait_for_round(directory: Path, number: int, process: RunningProcess) -> None:
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until and process.is_running:
        records = directory / "rounds.jsonl"
        if records.exists() and len(records.read_text().splitlines()) >= number:
            return
        time.sleep(0.02)
    raise AssertionError(f"round {number} was not reached")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory and the output of a run of four rounds."""
    directory = tmp_path_factory.mktemp("whole")
    command = [sys.executable, "-m", "esper.run", *TINY, "rounds=4", f"hydra.run.dir={directory}/run"]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[1])}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=directory, env=environment, timeout=TIMEOUT, **pipes)
    assert done.returncode == 0, done.stdout
    return directory / "run", done.stdout


def test_a_run_prints_its_header_progress_and_next_commands_and_writes_its_files(whole: tuple[Path, str]) -> None:
    directory, output = whole
    for word in ("run ", "device ", "synthetic_images", "parameters", "4 to come", f"tensorboard --logdir {directory}"):
        assert word in output
    assert re.search(r"round 4/4 +score [\d.]+ \(running", output)
    assert "held out, greedy" in output
    assert f"python -m esper.run resume={directory} rounds=8" in output
    assert "Traceback" not in output
    assert "Warning" not in output
    for name in ("rounds.jsonl", "rounds.png", "summary.json", "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        assert (directory / name).stat().st_size > 0
    assert not list(directory.rglob("*.part"))


def test_the_steps_of_tensorboard_are_decisions(whole: tuple[Path, str]) -> None:
    events = EventAccumulator(str(whole[0])).Reload()
    tags = events.Tags()["scalars"]
    groups = {tag.split("/")[0] for tag in tags if "/" in tag}
    assert {"episode", "policy", "losses", "health", "time", "validation"} <= groups
    assert [event.step for event in events.Scalars("episode/score")] == [8, 16, 24, 32]


def test_a_killed_run_resumes_to_bit_equal_weights_and_metrics(whole: tuple[Path, str], tmp_path: Path) -> None:
    """Killed in a round, while a checkpoint is written and in validation, and resumed with more rounds."""
    directory, killed = tmp_path / "run", -signal.SIGKILL
    target = "+callbacks.kill._target_=tests.fixtures_kill.KillPoint"
    resume = (f"resume={directory}", "+callbacks.kill.point=checkpoint", "+callbacks.kill.done=3")
    first = ("+callbacks.kill.point=training", "+callbacks.kill.done=1")
    start(tmp_path, *TINY, "rounds=3", f"hydra.run.dir={directory}", target, *first).finish(killed)
    start(tmp_path, *resume).finish(killed)
    assert len(list(directory.glob("checkpoints/*.part"))) == 1
    assert torch.load(directory / "checkpoints/last.ckpt", weights_only=True)["esper"]["counters"]["rounds"] == 2
    validating = ("rounds=4", "+callbacks.kill.point=sampled", "+callbacks.kill.done=4")
    output = start(tmp_path, resume[0], *validating).finish(killed)
    assert "rounds: 3 -> 4" in output
    start(tmp_path, resume[0], "+callbacks.kill.point=never").finish()
    resumed, uninterrupted = read_weights(directory), read_weights(whole[0])
    assert resumed.keys() == uninterrupted.keys()
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in resumed)
    assert read_metrics(directory) == read_metrics(whole[0])
    events = EventAccumulator(str(directory)).Reload().Scalars("episode/score")
    assert [event.step for event in events] == [8, 16, 24, 32]
    assert [path.name for path in tmp_path.iterdir()] == ["run"], "no other directory is made"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_a_checkpoint_and_ends_the_run(tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "run"
    process = start(tmp_path, *TINY, "rounds=1000", f"hydra.run.dir={directory}", "callbacks.checkpoints.every=1000")
    wait_for_round(directory, 1, process)
    for _ in range(2):  # as process managers do
        process.send_signal(number)
    output = process.finish()
    done = int(re.search(rf"stopped by {number.name} after round (\d+)", output)[1])  # type: ignore[index]
    assert f"python -m esper.run resume={directory}" in output
    assert "Traceback" not in output
    saved = torch.load(directory / "checkpoints/last.ckpt", weights_only=True)
    assert saved["esper"]["counters"]["rounds"] == done == len(read_metrics(directory))


def refused(directory: Path, *typed: str) -> str:
    """The message with which a command line is refused, run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(sys, "argv", ["esper.run", *typed])
        with pytest.raises(SystemExit) as error:
            cli()
    return str(error.value)


def test_an_error_on_the_command_line_is_one_sentence_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(tmp_path, *TINY, "ppo.lrr=1") == "ppo.lrr: there is no such key; the nearest is ppo.lr."
    assert tuple(capsys.readouterr()) == ("", "")


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("+ppo.lrr=1", r"^ppo.lrr: is not an argument of esper.ppo.PPOSettings; the nearest is lr\.$"),
        ("+rouns=3", r"^rouns: there is no such key; the nearest is rounds\.$"),
        ("ppo.lrr=1", r"^ppo.lrr: there is no such key; the nearest is ppo.lr\.$"),
        ("polcy=lstm", r"^polcy: there is no such key; the nearest is policy\.$"),
        ("~ppo.lrr", r"^ppo.lrr: there is no such key; the nearest is ppo.lr\.$"),
        ("+rounds=3", r"^rounds: exists already; set it without \+\.$"),
        ("experiment=oracle", r"^experiment: is not in the defaults list; add it with \+experiment=OPTION\.$"),
        ("rounds=1,2", r"^Ambiguous value for argument 'rounds=1,2'"),
        ("ppo.epochs=0", r"^ppo.epochs=0: must be at least 1\.$"),
        ("ppo.minibatches=3", r"^ppo.minibatches=3, .* at most the 2 episodes of a round \(environment.envs\)\.$"),
        ("reward=foo", r"^reward=foo: there is no such option; there are basic, .*sparse\.$"),
        ("rounds=0", r"^rounds=0: must be a whole number of at least 1\.$"),
        ("reward.terms.shaping.gamma=0.5", r"^reward.terms.shaping.gamma=0.5: must be gamma=1.0"),
        ("environment.time_limit=truncate", r"^environment.time_limit=truncate: must be terminate with gamma=1.0, "),
        ("ppo.gamma=0.5", r"^ppo.gamma=0.5: must be gamma=1.0"),
        ("environment.envs=abc", r"^environment.envs=abc: must be a whole number of at least 1\.$"),
        ("decisions=many", r"^decisions=many: must be a whole number of at least 1, or null\.$"),
        ("decisions=3", r"^decisions=3: must be at least 8, the decisions of one round\.$"),
        ("ppo.entropy_final=abc", r"^ppo.entropy_final=abc: must be a finite number, or null\.$"),
        ("ppo.lr_final=-1", r"^ppo.lr_final=-1: must be at least 0\.$"),
        ("ppo.entropy_weights=[op]", r"^ppo.entropy_weights=\['op'\]: must be finite numbers by name, or null\.$"),
        ("policy.compile=fast", r"^policy.compile=fast: must be one of default, reduce-overhead, "),
        ("trainer.accelerator=gpu", r"^lightning.pytorch.Trainer: .*"),
        ("trainer.precision=bf16-mixed", r"^trainer.precision=bf16-mixed: must be 32-true"),
        ("optimized_metric=episode/scroe", r"^optimized_metric=episode/scroe: .* the nearest is episode/score\.$"),
        (
            "callbacks.checkpoints.best=nothing",
            r"^callbacks.checkpoints.best=nothing: must be a metric of a run",
        ),
        ("policy.floors={slt: 0.1}", r"^policy.floors={'slt': 0.1}: must be in \[0, 1\) by head"),
        ("device=cuda", r"^device=cuda: there is no CUDA device here"),
        ("data.device=cuda", r"^data.device=cuda: there is no CUDA device here"),
        ("resume=nowhere", r"^resume=nowhere: must be latest or the directory of the run to resume\.$"),
        ("resume=latest", r"^resume=latest: there is no run under outputs/ here\.$"),
    ],
)
def test_bad_input_gets_one_sentence_and_leaves_nothing(tmp_path: Path, typed: str, sentence: str) -> None:
    output = refused(tmp_path, *TINY, typed)
    assert re.search(sentence, output), output
    assert "\n" not in output
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("policy.hidden=32", r"^policy.hidden=32: the checkpoint .* has 16\.$"),
        ("seed=5", r"^seed=5: a resumed run keeps its seed=0\.$"),
        ("start=pretrained", r"^start=pretrained: a resumed run keeps its start=None\.$"),
        ("actions=full", r"^options: this run has"),
        ("+experiment=cifar_ppo", r"^\+experiment=cifar_ppo: cannot change in a resumed run; leave it out\.$"),
        ("debug=fast", r"^\+debug=fast: cannot change in a resumed run; leave it out\.$"),
        ("rounds=3", r"^rounds=3: must be at least 4, the rounds done\.$"),
    ],
)
def test_a_resumed_run_refuses_keys_that_cannot_change(whole: tuple[Path, str], typed: str, sentence: str) -> None:
    files = {path: path.read_bytes() for path in whole[0].rglob("*.ckpt")}
    output = refused(whole[0].parent, f"resume={whole[0]}", typed)
    assert re.search(sentence, output), output
    assert all(path.read_bytes() == content for path, content in files.items())


def test_a_refused_run_removes_only_the_files_of_hydra(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of the user")
    refused(tmp_path, *TINY, "rounds=0", "hydra.run.dir=.")
    assert (tmp_path / "notes.txt").read_text() == "of the user"


def test_overrides_of_a_resumed_run_change_its_experiment_and_are_saved(tmp_path: Path) -> None:
    first = ["+experiment=cartpole_memory", "reward=shaped", "ppo.lr=0.1"]
    (tmp_path / ".hydra").mkdir()
    save_config(compose_config("run", first), tmp_path, first)
    for typed, key, value in (
        ("ppo.lr=0.2", "ppo.lr", 0.2), ("ppo.lr=0.1", "ppo.lr", 0.1),
        ("environment.features=[0]", "environment.features", [0]),
        ("reward=basic", "reward.terms.final._target_", "esper.rewards.terms.FinalGain"),
        ("~callbacks.health", "callbacks.health", None), ("trainer=gpu", "device", "cuda:0"),
        ("ppo.lam=${gamma}", "ppo.lam", 0.99),
    ):  # fmt: skip
        arguments = resume_arguments([f"resume={tmp_path}", typed])
        overrides = [argument for argument in arguments if not argument.startswith(("hydra", "resume"))]
        config, changes = merge_overrides(compose_config("run", overrides), tmp_path)
        assert OmegaConf.select(config, key) == value, typed
        assert any(change.startswith(key.split(".")[0]) for change in changes)
        save_config(config, tmp_path, overrides)
    assert read_overrides(tmp_path).count("ppo.lr=0.1") == 1
    assert "ppo.lr=0.2" not in read_overrides(tmp_path)


def test_new_overrides_win_over_saved_values_of_presets_that_have_changed_since(tmp_path: Path) -> None:
    first = ["+experiment=cartpole_memory"]
    (tmp_path / ".hydra").mkdir()
    saved, preset = compose_config("run", [*first, "rounds=999"]), compose_config("run", first).rounds
    save_config(saved, tmp_path, first)  # as if the preset had had 999 rounds then
    config, changes = merge_overrides(compose_config("run", first), tmp_path, overrides=first)
    assert (config.rounds, changes) == (999, [])
    again = [*first, f"rounds={preset}"]
    config, changes = merge_overrides(compose_config("run", again), tmp_path, overrides=again)
    assert (config.rounds, changes) == (preset, [f"rounds: 999 -> {preset}"])


def test_a_key_that_the_saved_configuration_lacks_can_be_typed_with_any_value(tmp_path: Path) -> None:
    first = ["+experiment=oracle"]
    (tmp_path / ".hydra").mkdir()
    saved = compose_config("run", first)
    with open_dict(saved):
        del saved.actions.fixed.tempo  # as if the head had been added later
    save_config(saved, tmp_path, first)
    for value in ("FAST", "SLOW"):
        typed = [*first, f"actions.fixed.tempo={value}"]
        config, _ = merge_overrides(compose_config("run", typed), tmp_path, overrides=typed)
        assert config.actions.fixed.tempo == value


def test_a_corrupt_checkpoint_is_refused_and_not_overwritten(whole: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/.hydra").mkdir()
    (tmp_path / "run/.hydra/config.yaml").write_text((whole[0] / ".hydra/config.yaml").read_text())
    (tmp_path / "run/checkpoints/last.ckpt").write_bytes(b"nonsense")
    assert "not a readable checkpoint" in refused(tmp_path, f"resume={tmp_path}/run")
    assert (tmp_path / "run/checkpoints/last.ckpt").read_bytes() == b"nonsense"


def test_help_has_examples_and_every_experiment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["esper.run", "--help"])
    cli()
    output = capsys.readouterr().out
    assert output.count("python -m esper.run") == 6
    for path in CONF.glob("*/**/*.yaml"):
        assert path.stem in output


@pytest.mark.parametrize("module", ["run", "evaluate", "tune", "report", "data"])
def test_help_imports_neither_torch_nor_lightning(module: str) -> None:
    code = f"import runpy, sys; sys.argv = ['esper', '--help']; runpy.run_module('esper.{module}', run_name='__main__')"
    heavy = "{'torch', 'lightning', 'pydantic', 'matplotlib'}"
    check = f"import atexit, sys; atexit.register(lambda: print('heavy', sorted({heavy} & set(sys.modules)))); {code}"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy []"


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "experiment").glob("*.yaml")))
def test_every_experiment_composes_for_training_and_evaluation_and_opens_with_its_command(name: str) -> None:
    config = compose_config("run", [f"+experiment={name}"])
    assert config.name == name
    assert compose_config("evaluate", [f"+experiment={name}"]).name == name
    assert f"# python -m esper.run +experiment={name}" in (CONF / f"experiment/{name}.yaml").read_text()


def test_the_gpu_experiment_has_the_same_task_at_full_size() -> None:
    small, full = (compose_config("run", [f"+experiment={name}"]) for name in ("cifar_ppo", "cifar_ppo_gpu"))
    assert (full.data.resolution, full.data.validation) == (32, 5_000)
    images = full.environment.batch * full.environment.budget_batches
    assert 0 <= images - 10 * 45_000 < full.environment.batch, "the budget is ten passes over the training images"
    assert full.environment.budget is None
    assert full.environment.envs > small.environment.envs
    assert (full.device, full.trainer.accelerator) == ("cuda:0", "gpu")
    assert (full.host.channels, full.ppo, full.rounds) == (small.host.channels, small.ppo, small.rounds)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_experiment_trains_on_a_gpu(tmp_path: Path) -> None:
    small = ["+debug=fast", "data=synthetic_images", "data.resolution=32"]
    train(compose_config("run", ["+experiment=cifar_ppo_gpu", *small]), tmp_path, Console(quiet=True))
    assert len(list(read_lines(tmp_path / "rounds.jsonl"))) == 2


def test_debug_overrides_an_experiment() -> None:
    assert move_debug_last(["debug=fast", "+experiment=a", "--cfg", "job"]) == [
        "+experiment=a", "+debug=fast", "--cfg", "job",
    ]  # fmt: skip
    config = compose_config("run", resume_arguments(["debug=fast", "+experiment=cifar_ppo"]))
    assert (config.rounds, config.environment.envs, config.environment.steps, config.data.resolution) == (2, 2, 4, 16)


def test_a_small_gpt_grows_on_stories(tmp_path: Path) -> None:
    text = ("+experiment=tinystories_ppo", "debug=fast", *SMALL_TEXT, "environment.batches=1")
    metrics = train(compose_config("run", resume_arguments(text)), tmp_path, Console(quiet=True))
    assert metrics["episode/score"] < 0, "minus bits per byte"
    assert len(read_metrics(tmp_path)) == 2
