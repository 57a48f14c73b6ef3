"""TinyStories: read from local text files, or downloaded from its official site."""

import logging
from pathlib import Path
from typing import Unpack

from esper.data import synthetic
from esper.data.store import DataError, data_directory, download, write_atomically
from esper.data.text import HOLD_OUT_EVERY, TextData, TextOptions
from esper.data.tokens import END

TINYSTORIES_URL = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/{}"
FILES = {"train": "TinyStories-train.txt", "valid": "TinyStories-valid.txt"}

CHECK_BYTES = 1 << 20  # first bytes of a download, which must contain a separator

log = logging.getLogger(__name__)


def load_tinystories(*, root: str | None, fallback: bool, **options: Unpack[TextOptions]) -> TextData:
    """Load TinyStories. Validation stories come from the training file; the official validation file is the test split.

    The remaining arguments are those of esper.data.text.TextOptions.

    Arguments:
        root: directory with train.txt and valid.txt; missing files are downloaded into it; None is the cache directory
        fallback: use synthetic stories, under their own name, if TinyStories cannot be loaded or downloaded
    """
    try:
        paths = find(data_directory(root))
        known = read_stories(paths["train"], _bytes_to_read(options), require_separators=True)
        unseen = read_stories(paths["valid"])
    except DataError as error:
        if not fallback:
            raise
        log.warning("%s Using SYNTHETIC STORIES instead (data.fallback=true); results are not on TinyStories.", error)
        return synthetic.stories(**options)
    return TextData(name="tinystories", known=known, unseen=unseen, cache=data_directory(None), **options)


def _bytes_to_read(options: TextOptions) -> int | None:
    """Bytes of the training file that contain the requested text, with a safety factor of 2; None is the whole file."""
    train, validation = options["train_bytes"], options["validation_bytes"]
    if train is None or validation is None:
        return None
    return 2 * (train + HOLD_OUT_EVERY * validation)


def find(root: Path) -> dict[str, Path]:
    """Paths of the training and the validation file; missing files are downloaded into `root`."""
    paths = {}
    for part, official in FILES.items():
        names = (f"{part}.txt", official)
        candidates = [folder / name for folder in (root, root / "tinystories") for name in names]
        paths[part] = next((path for path in candidates if path.is_file()), None) or _download_file(root, official)
    return paths


def _download_file(root: Path, official: str) -> Path:
    url = TINYSTORIES_URL.format(official)
    try:
        with write_atomically(root / official) as path:
            download(url, path)
            with path.open("rb") as file:
                if END.encode() not in file.read(CHECK_BYTES):
                    raise DataError(f"the response of {url} is not TinyStories.")
    except DataError as error:
        hint = "set data.root to a directory with train.txt and valid.txt"
        raise DataError(f"TinyStories is not in {root}, and cannot be downloaded ({hint}): {error}") from error
    return root / official


def read_stories(path: Path, max_bytes: int | None = None, require_separators: bool = False) -> list[str]:
    """The stories of a file, or of its first `max_bytes` bytes, without blank lines.

    A file without separators is one story; it is refused if `require_separators`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(-1 if max_bytes is None else max_bytes)
        text = content.decode(errors="strict" if max_bytes is None else "ignore")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is damaged: it is not text in UTF-8 (byte {error.start:,}).") from error
    stories = ["\n".join(line.strip() for line in part.splitlines() if line.strip()) for part in text.split(END)]
    stories = [story for story in stories if story]
    if not stories:
        raise DataError(f"{path} contains no stories.")
    if require_separators and len(stories) == 1:
        raise DataError(f"{path} is refused: its stories are not separated by {END}.")
    return stories
