"""Lines of JSON that belong to rounds; a resumed run takes back those of rounds that it plays again."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.records import LineWriter, read_lines


class RoundFile:
    """A file of lines, each with its `round`; whole lines only, whatever happens to the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writer: LineWriter | None = None

    def begin(self, rounds: int) -> None:
        """Go on behind so many rounds."""
        self.keep(lambda line: line["round"] <= rounds)
        self._writer = LineWriter(self.path)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Take back all lines that are not wanted."""
        found = self.lines()
        kept = [line for line in found if wanted(line)]
        if len(kept) < len(found):
            self.rewrite(kept)

    def rewrite(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """These lines in place of all."""
        self.close()
        unfinished = self.path.with_suffix(".part")
        unfinished.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
        unfinished.replace(self.path)

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
