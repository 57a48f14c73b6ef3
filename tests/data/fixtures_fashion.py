"""A small Fashion-MNIST: the official file layout with 60 training and 20 test images, and the npm package."""

import gzip
import hashlib
import json
import tarfile
from pathlib import Path

import numpy as np

from esper.data import fashion_mnist
from tests.data.fixtures_files import add

COUNTS = {"train": 60, "test": 20}


def images() -> np.ndarray:
    """Images [80, 28, 28]; the label of each is its index modulo 10."""
    return np.random.default_rng(0).integers(256, size=(sum(COUNTS.values()), 28, 28), dtype=np.uint8)


def contents() -> dict[str, bytes]:
    """The official files by name."""
    train, test = np.split(images(), [COUNTS["train"]])
    result = {}
    for part, pixels in (("train", train), ("t10k", test)):
        labels = (np.arange(len(pixels)) % 10).astype(np.uint8)
        result[f"{part}-images-idx3-ubyte"] = np.array([2051, len(pixels), 28, 28], ">i4").tobytes() + pixels.tobytes()
        result[f"{part}-labels-idx1-ubyte"] = np.array([2049, len(pixels)], ">i4").tobytes() + labels.tobytes()
    return result


def write_idx_files(folder: Path, *, compress: bool) -> dict[str, str]:
    """Write the official files; returns the MD5 of each."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name, content in contents().items():
        path = folder / (f"{name}.gz" if compress else name)
        path.write_bytes(gzip.compress(content) if compress else content)
        sums[name] = hashlib.md5(path.read_bytes()).hexdigest()
    return sums


def write_fashion_package(path: Path) -> str:
    """Write a small npm package with two empty entries in class 0; returns its SHA-256."""
    with tarfile.open(path, "w:gz") as archive:
        for label in range(len(fashion_mnist.GARMENTS)):
            entries = images()[label::10].reshape(-1, 784).tolist()
            if label == 0:
                entries = [entries[0], [], *entries[1:], []]
            add(archive, f"package/src/clothes/{label}.json", json.dumps({"data": entries}).encode())
    return hashlib.sha256(path.read_bytes()).hexdigest()
