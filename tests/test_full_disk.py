"""A full disk, and output paths that cannot be made: one sentence, exit code 1, nothing half-written."""

import logging
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from esper import evaluate, report, run
from esper.checkpoints import __main__ as checkpoints
from esper.files import write_buffered, write_file
from esper.ppo import AtomicCheckpointIO
from esper.records import LineWriter, read_rounds
from tests.fixtures_environment import SMALL
from tests.fixtures_process import TIMEOUT

pytestmark = pytest.mark.xdist_group("full disk")  # they share a run

SIZES = (*SMALL, "host=cifar_blind", "environment.steps=3")
TINY = ("+experiment=oracle", "environment.envs=2", "policy.hidden=16", "ppo.epochs=1", "collector.warmup=1",
        "validate_every=0", "callbacks.dashboard=null")  # fmt: skip
FULL = "No space left on device"


def exit_sentence(entry: Callable[[], object], *arguments: str) -> str | int | None:
    """What a command ends with: None, an exit code, or a sentence that Python prints, with exit code 1."""
    handlers = list(logging.root.handlers)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "argv", ["esper", *arguments])
        warnings.simplefilter("ignore")  # a run sets its own filters
        try:
            entry()
        except SystemExit as stop:
            return stop.code
        finally:
            for handler in [handler for handler in logging.root.handlers if handler not in handlers]:
                with suppress(OSError):
                    handler.close()
    return None


class SmallDisk:
    """A file system of 1 MB in memory."""

    def __init__(self, path: Path) -> None:
        self.path, self._filler = path, path / "filler"

    def fill(self, free: int = 0) -> None:
        """Leave only `free` kB."""
        self.clear()
        size = shutil.disk_usage(self.path).free - free * 1024
        self._filler.write_bytes(bytes(max(0, size)))

    def clear(self) -> None:
        self._filler.unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield SmallDisk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of three rounds."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    assert exit_sentence(run.cli, *TINY, "rounds=3", f"hydra.run.dir={directory}") is None
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(directory / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    return state


def test_a_run_on_a_full_disk_keeps_its_checkpoint_and_resumes_to_bit_equal_weights(
    trained: Path, disk: SmallDisk, capfd: pytest.CaptureFixture[str]
) -> None:
    directory = disk.path / "run"
    assert exit_sentence(run.cli, *TINY, "rounds=1", f"hydra.run.dir={directory}") is None
    capfd.readouterr()
    before = weights(directory)
    places = set()
    for free in (0, 100):  # the saved configuration does not fit; checkpoints do not fit
        disk.fill(free)
        sentence = exit_sentence(run.cli, f"resume={directory}", "rounds=3")
        assert isinstance(sentence, str)
        place, _, rest = sentence.partition(": ")
        places.add(Path(place).name)
        assert rest == f"{FULL}; resume with python -m esper.run resume={directory}"
        assert capfd.readouterr().err == ""
        assert not list(directory.rglob("*.part"))
        assert all(torch.equal(value, before[name]) for name, value in weights(directory).items())
    assert {"config.yaml", "best.ckpt"} <= places or {"config.yaml", "last.ckpt"} <= places
    disk.clear()
    assert exit_sentence(run.cli, f"resume={directory}", "rounds=3") is None
    expected = weights(trained)
    assert all(torch.equal(value, expected[name]) for name, value in weights(directory).items())
    assert [line["round"] for line in read_rounds(directory / "rounds.jsonl")] == [1, 2, 3]


def test_a_disk_that_is_full_for_tensorboard_is_one_line_on_stderr(disk: SmallDisk) -> None:
    """TensorBoard writes in a thread, whose error Python would print with a traceback."""
    disk.fill(free=32)
    directory = disk.path / "run"
    command = [sys.executable, "-m", "esper.run", *TINY[:-1], "rounds=99", f"hydra.run.dir={directory}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert (ended.returncode, ended.stderr) == (1, f"{directory}: {FULL}.\n")
    assert list(directory.glob("events.out.*"))


def test_a_disk_that_is_full_from_the_start_leaves_no_directory(disk: SmallDisk) -> None:
    disk.fill()
    directory = disk.path / "run"
    assert exit_sentence(run.cli, *TINY, "rounds=1", f"hydra.run.dir={directory}") == f"{directory}: {FULL}."
    assert not directory.exists()


def test_lines_that_do_not_fit_are_not_written_in_part(disk: SmallDisk) -> None:
    path = disk.path / "rounds.jsonl"
    writer = LineWriter(path)
    writer.write({"round": 1})
    disk.fill()
    with pytest.raises(OSError, match=f"{FULL}: '{path}'"):
        writer.write({"round": 2}, {"round": 3, "text": "x" * 9000})
    assert path.read_text() == '{"round": 1}\n'
    disk.clear()
    writer.write({"round": 2})
    writer.close()
    assert [line["round"] for line in read_rounds(path)] == [1, 2]


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_file(path, "new"),
        lambda path: write_buffered(path, lambda file: file.write(b"new")),
        lambda path: AtomicCheckpointIO().save_checkpoint({"new": torch.zeros(9)}, path),
    ],
    ids=["file", "buffer", "checkpoint"],
)
def test_a_file_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    path.write_text("earlier")
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"{FULL}: '{path}'"):
        write(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "earlier"


def test_an_output_path_below_a_file_is_refused(trained: Path, tmp_path: Path) -> None:
    below = tmp_path / "file" / "directory"
    below.parent.write_text("a file")
    sweep = ("-m", *TINY, "seed=0,1", f"hydra.sweep.dir={below}")
    commands: dict[str, Callable[[], object]] = {
        "run": lambda: exit_sentence(run.cli, *TINY, f"hydra.run.dir={below}"),
        "sweep": lambda: exit_sentence(run.cli, *sweep),
        "evaluate": lambda: exit_sentence(evaluate.cli, *SIZES, f"hydra.run.dir={below}"),
        "report": lambda: exit_sentence(report.main, str(trained), "--out", str(below)),
        "checkpoints": lambda: exit_sentence(checkpoints.main, "pretrained", str(below / "kept.pt")),
    }
    assert {name: command() for name, command in commands.items()} == dict.fromkeys(
        commands, f"{below}: Not a directory."
    )


def test_a_job_that_cannot_write_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = tmp_path / "sweep/0/summary.json"
    summary.parent.mkdir(parents=True)
    summary.with_name("summary.json.part").symlink_to("/dev/full")
    arguments = ("-m", *TINY, "rounds=1", "seed=0,1", "logger=none")
    assert exit_sentence(run.cli, *arguments, f"hydra.sweep.dir={tmp_path}/sweep") == 1
    sentence = f"{summary}: {FULL}."
    assert (tmp_path / "sweep/0/failed.txt").read_text() == f"{sentence}\n"
    assert (tmp_path / "sweep/1/summary.json").is_file()
    assert capsys.readouterr().err == f"{tmp_path}/sweep/0: failed: {sentence}\n"


def test_an_evaluation_and_a_report_that_cannot_be_written_end_in_one_sentence(tmp_path: Path) -> None:
    directory = tmp_path / "evaluation"
    directory.mkdir()
    (directory / "evaluation.json.part").symlink_to("/dev/full")
    sentence = exit_sentence(
        evaluate.cli, *SIZES, "controllers=[none,random]", "episodes=1", f"hydra.run.dir={directory}"
    )
    resume = f"resume with python -m esper.evaluate resume={directory}"
    assert sentence == f"{directory}/evaluation.json: {FULL}; {resume}"
    assert not (directory / "evaluation.json").exists()
    assert exit_sentence(evaluate.cli, f"resume={directory}") is None
    (directory / "report.html.part").symlink_to("/dev/full")
    assert exit_sentence(report.main, str(directory)) == f"{directory}/report.html: {FULL}."
