"""Data directories, and atomic downloads into them."""

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.status import Status

TIMEOUT = 20.0  # seconds without a response before a download fails
CHUNK = 1 << 20  # bytes


class DataError(Exception):
    """Data is missing, damaged or misconfigured; the message is one sentence for the user."""


def cache_directory() -> Path:
    """The default directory for data: ESPER_DATA, or `esper` in the user's cache."""
    if path := os.environ.get("ESPER_DATA"):
        return Path(os.path.expanduser(path))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "esper"


def data_directory(root: str | Path | None) -> Path:
    """The directory for data: `root`, which must exist, or the cache directory, which is created."""
    if root is None:
        try:
            cache_directory().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"The data directory {cache_directory()} cannot be created ({_reason(error)}).") from error
        return cache_directory()
    path = Path(os.path.expanduser(root))
    if not path.is_dir():
        raise DataError(f"root={root}: must be an existing directory.")
    return path


@contextmanager
def write_atomically(target: Path) -> Iterator[Path]:
    """Context with a temporary path for a file or directory, which is renamed to `target` if no error occurs."""
    try:
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as temporary:
            path = Path(temporary) / target.name
            yield path
            if not (path.is_dir() and target.is_dir()):  # another process may have been faster
                path.replace(target)
    except OSError as error:
        raise DataError(f"{target} cannot be written ({_reason(error)}).") from error


def download(url: str, target: Path, *, md5: str | None = None) -> None:
    """Download a file with a progress bar, and check its length and its MD5 checksum, if `md5` is set."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response, target.open("wb") as file:
            length = response.headers.get("Content-Length")
            with _progress() as progress:
                task = progress.add_task(target.name, total=int(length) if length else None)
                while chunk := response.read(CHUNK):
                    file.write(chunk)
                    progress.advance(task, len(chunk))
    except (OSError, HTTPException) as error:
        raise DataError(f"{url} could not be downloaded ({_reason(error)}).") from error
    if length and target.stat().st_size != int(length):
        raise DataError(f"{url}: the download ended after {target.stat().st_size:,} of {int(length):,} bytes.")
    if md5 is not None:
        verify_checksum(target, "md5", md5)


def verify_checksum(path: Path, algorithm: str, expected: str) -> None:
    """Raise DataError for a file whose checksum is not the expected one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, algorithm).hexdigest()
    if actual != expected:
        raise DataError(f"{path} is damaged: its {algorithm} is {actual}, not {expected}.")


def show_status(message: str) -> Status:
    """Context that shows a message and a spinner."""
    return Console(stderr=True).status(message)


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    return getattr(inner, "strerror", None) or str(inner)
