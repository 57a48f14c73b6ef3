"""The metrics of every round as JSON lines, and the table at the end of a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.table import Table

from esper.ppo import PPO
from esper.records import HELD_OUT
from esper.telemetry.round_file import RoundFile


class RoundWriter(Callback):
    """Writes `rounds.jsonl`; a resumed run removes the lines of rounds that it runs again.

    Arguments:
        directory: directory of the run
    """

    def __init__(self, directory: str | Path) -> None:
        self._file = RoundFile(Path(directory) / "rounds.jsonl")

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        self._file.open_after(pl_module.counters.rounds)

    @rank_zero_only
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        counters = pl_module.counters
        line: dict[str, Any] = {"round": counters.rounds, "decisions": counters.decisions}
        for name, value in pl_module.latest_metrics.items():
            is_fresh = not name.startswith("validation/") or pl_module.validated_round == counters.rounds
            if is_fresh:
                line[name] = value if math.isfinite(value) else None
        self._file.write(line)

    @rank_zero_only
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._file.close()

    def lines(self) -> list[dict[str, Any]]:
        """All rounds so far."""
        return self._file.lines()

    def amend(self, metrics: Mapping[str, float]) -> list[dict[str, Any]]:
        """Add metrics that were measured after the last round to its line; returns all lines."""
        lines = self.lines()
        lines[-1].update({name: value if math.isfinite(value) else None for name, value in metrics.items()})
        self._file.rewrite(lines)
        return lines


def summary_table(rounds: Sequence[dict[str, Any]], held_out: Mapping[str, float], share: float) -> Table:
    """The result of a run: its first and last rounds (each a `share` of all), its best round, and validation."""
    names = [name.removeprefix("episode/") for name in rounds[0] if name.startswith("episode/")]
    table = Table(title="means over episodes")
    for name in ("", *names):
        table.add_column(name.replace("_", " "), justify="right" if name else "left")
    count = max(1, round(share * len(rounds)))
    best = max(rounds, key=lambda line: float("-inf") if line["episode/score"] is None else line["episode/score"])
    some = "round" if count == 1 else f"{count} rounds"
    parts = {f"first {some}": rounds[:count], f"last {some}": rounds[-count:]}
    parts[f"best round, {best['round']}"] = [best]
    for label, lines in parts.items():
        columns = [[line[f"episode/{name}"] for line in lines if line[f"episode/{name}"] is not None] for name in names]
        table.add_row(label, *[f"{sum(values) / len(values):.2f}" if values else "-" for values in columns])
    for kind in HELD_OUT:
        if f"validation/{kind}_score" in held_out:
            table.add_row(f"held out, {kind}", *[f"{held_out[f'validation/{kind}_{name}']:.2f}" for name in names])
    return table
