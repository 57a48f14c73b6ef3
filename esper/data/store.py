"""Where data is kept, and how it gets there without ever being half there."""

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

TIMEOUT = 20.0  # seconds without an answer before a download is given up
CHUNK = 1 << 20  # bytes


class DataError(Exception):
    """Data that cannot be had or must not be used; the message is one sentence for the user."""


def cache() -> Path:
    """esper's own directory for data: ESPER_DATA, or `esper` in the user's cache."""
    if own := os.environ.get("ESPER_DATA"):
        return Path(os.path.expanduser(own))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "esper"


def directory(root: str | Path | None) -> Path:
    """Where data is looked for and put: `root`, which must exist, or else the cache, which is made."""
    if root is None:
        try:
            cache().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"The data directory {cache()} cannot be made ({_reason(error)}).") from error
        return cache()
    path = Path(os.path.expanduser(root))
    if not path.is_dir():
        raise DataError(f"root={root}: there is no such directory.")
    return path


@contextmanager
def partial(target: Path) -> Iterator[Path]:
    """A place beside `target` to make a file or directory, which takes the target's name only if all went well."""
    try:
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as workplace:
            made = Path(workplace) / target.name
            yield made
            if not (made.is_dir() and target.is_dir()):  # another process may have been faster
                made.replace(target)
    except OSError as error:
        raise DataError(f"{target} cannot be written ({_reason(error)}).") from error


def download(url: str, target: Path, *, md5: str | None = None) -> None:
    """Fetch a file with a progress bar, and check its length and, where one is given, its checksum."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, target.open("wb") as file:
            length = answer.headers.get("Content-Length")
            with _progress() as progress:
                task = progress.add_task(target.name, total=int(length) if length else None)
                while chunk := answer.read(CHUNK):
                    file.write(chunk)
                    progress.advance(task, len(chunk))
    except (OSError, HTTPException) as error:
        raise DataError(f"{url} could not be downloaded ({_reason(error)}).") from error
    if length and target.stat().st_size != int(length):
        raise DataError(f"{url} broke off after {target.stat().st_size:,} of {int(length):,} bytes.")
    if md5 is not None:
        check(target, "md5", md5)


def check(path: Path, algorithm: str, expected: str) -> None:
    """Refuse a file whose checksum is not the expected one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise DataError(f"{path} is damaged: its {algorithm} is {found}, not {expected}.")


def working(message: str) -> Status:
    """Shows that something takes a while, for as long as the context lasts."""
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
