"""JSON lines that belong to rounds; a resumed run removes those of rounds that it runs again."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.files import write_file
from esper.records import LineWriter, read_lines


class RoundFile:
    """A file of JSON lines, each with its `round`; it has whole lines only, even if the run is killed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: LineWriter | None = None

    def open_after(self, rounds: int) -> None:
        """Open the file to continue after the given number of rounds; later lines are removed."""
        self.filter_lines(lambda line: line["round"] <= rounds)
        self._writer = LineWriter(self.path)

    def filter_lines(self, is_wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Remove all lines that are not wanted."""
        lines = self.lines()
        wanted = [line for line in lines if is_wanted(line)]
        if len(wanted) < len(lines):
            self.rewrite(wanted)

    def rewrite(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Replace all lines, atomically."""
        self.close()
        write_file(self.path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))

    def write(self, line: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._writer = LineWriter(self.path)
        self._writer.write(line)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def lines(self) -> list[dict[str, Any]]:
        return list(read_lines(self.path)) if self.path.exists() else []
