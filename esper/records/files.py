"""Files of JSON lines: `episodes.jsonl` and `rounds.jsonl`."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import finalize

from esper.files import named_errors
from esper.records.record import EpisodeRecord


class LineWriter:
    """Appends whole JSON lines and flushes them.

    A last line that is incomplete, since an earlier writer was killed or the disk was full, is removed. `fresh` removes
    all lines.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self._path = path
        if path.exists():
            content = b"" if fresh else path.read_bytes()
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
        self._file = path.open("ab", buffering=0)
        finalize(self, self._file.close)  # an error ends a run without the teardown of its callbacks

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Write lines together: if one cannot be written, none of them is in the file."""
        rest = memoryview("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode())
        end = os.fstat(self._file.fileno()).st_size
        try:
            with named_errors(self._path):
                while rest:  # the last bytes of a disk take a part of the lines
                    rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, what: str = "an episode") -> Iterator[dict[str, Any]]:
    """The lines of a JSON Lines file; an incomplete last line is ignored."""
    for number, line in enumerate(_read_text(path).split("\n")[:-1], 1):
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is not {what} record.") from error
        yield content


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's rounds.jsonl; empty if the file does not exist."""
    if not path.is_file():
        return []
    lines = list(read_lines(path, "a round"))
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not isinstance(line.get("round"), int):
            raise ValueError(f"{path}: line {number} is not a round record.")
    return lines


def read_episodes(path: Path) -> tuple[list[EpisodeRecord], list[str]]:
    """The episodes of a file, and a sentence for each line, or range of lines, that cannot be read."""
    episodes: list[EpisodeRecord] = []
    problems: list[tuple[int, str]] = []  # line number, what is wrong
    *lines, rest = _read_text(path).split("\n")
    for number, line in enumerate(lines, 1):
        try:
            episodes.append(EpisodeRecord.from_dict(json.loads(line)))
        except json.JSONDecodeError:
            problems.append((number, "is not JSON"))
        except ValueError as error:
            problems.append((number, str(error)))
    if rest:
        problems.append((len(lines) + 1, "was cut off"))
    messages = [f"{path}: {sentence}" for sentence in _sentences(problems)]
    if problems:
        messages.append(f"{path}: {len(problems)} lines could not be read, {len(episodes)} could.")
    return episodes, messages


def _sentences(problems: Sequence[tuple[int, str]]) -> list[str]:
    """One for each line, or for consecutive lines with the same problem."""
    sentences = []
    for (_, problem), group in groupby(enumerate(problems), lambda item: (item[1][0] - item[0], item[1][1])):
        numbers = [number for _, (number, _) in group]
        if len(numbers) == 1:
            sentences.append(f"line {numbers[0]} {problem}; it is left out.")
        else:
            sentences.append(f"each of lines {numbers[0]} to {numbers[-1]} {problem}; they are left out.")
    return sentences


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # bytes that are not text are not JSON either
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
