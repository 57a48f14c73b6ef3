"""TinyStories: from local text files, else from its official home."""

import logging
from pathlib import Path
from typing import Unpack

from esper.data import synthetic
from esper.data.store import DataError, directory, download, partial
from esper.data.text import HELD_OUT, TextData, TextOptions
from esper.data.tokens import END

URL = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/{}"
FILES = {"train": "TinyStories-train.txt", "valid": "TinyStories-valid.txt"}

LOOK_AT = 1 << 20  # bytes of a new file in which a separator must stand

log = logging.getLogger(__name__)


def load(*, root: str | None, fallback: bool, **options: Unpack[TextOptions]) -> TextData:
    """TinyStories, ready to train on. Validation stories are held out of the training file; the other file is the test.

    Arguments:
        root: a directory with train.txt and valid.txt, or to put them; None is the cache
        fallback: whether synthetic stories may stand in, under their own name, where TinyStories cannot be had
    """
    try:
        places = find(directory(root))
        known, unseen = read(places["train"], _enough(options), separated=True), read(places["valid"])
    except DataError as error:
        if not fallback:
            raise
        log.warning("%s SYNTHETIC STORIES stand in (data.fallback=true); nothing here is about TinyStories.", error)
        return synthetic.stories(**options)
    return TextData(name="tinystories", known=known, unseen=unseen, cache=directory(None), **options)


def _enough(options: TextOptions) -> int | None:
    """How many bytes of the training file hold as much text as is asked for, generously; None is the whole file."""
    train, validation = options["train_bytes"], options["validation_bytes"]
    if train is None or validation is None:
        return None
    return 2 * (train + HELD_OUT * validation)


def find(root: Path) -> dict[str, Path]:
    """The training and the validation file; fetched into `root` first if they are not there."""
    found = {}
    for part, official in FILES.items():
        names = (f"{part}.txt", official)
        places = [folder / name for folder in (root, root / "tinystories") for name in names]
        found[part] = next((place for place in places if place.is_file()), None) or _fetched(root, official)
    return found


def _fetched(root: Path, official: str) -> Path:
    url = URL.format(official)
    try:
        with partial(root / official) as place:
            download(url, place)
            with place.open("rb") as file:
                if END.encode() not in file.read(LOOK_AT):
                    raise DataError(f"what {url} sent is not TinyStories.")
    except DataError as error:
        told = "data.root may name a directory with train.txt and valid.txt"
        raise DataError(f"TinyStories is not in {root}, and cannot be fetched ({told}): {error}") from error
    return root / official


def read(path: Path, most: int | None = None, separated: bool = False) -> list[str]:
    """The stories of a file, or of its first `most` bytes, without blank lines.

    A file without separators is one story; it is refused where `separated` stories are needed.
    """
    try:
        with path.open("rb") as file:
            content = file.read(-1 if most is None else most)
        text = content.decode(errors="strict" if most is None else "ignore")
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is damaged: it is not text in UTF-8 (byte {error.start:,}).") from error
    stories = ["\n".join(line.strip() for line in part.splitlines() if line.strip()) for part in text.split(END)]
    stories = [story for story in stories if story]
    if not stories:
        raise DataError(f"{path} holds no stories.")
    if separated and len(stories) == 1:
        raise DataError(f"{path} is not used: its stories are not separated by {END}.")
    return stories
