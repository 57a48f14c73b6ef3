"""Progress bars over rounds and over the steps of a round; lines of text if there is no terminal."""

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBars
from torch import Tensor
from torchmetrics.aggregation import RunningMean

from esper.ppo import PPO, Rollout

WINDOW = 5  # rounds of the running mean of scores


class ProgressDisplay(Callback):
    """Shows the progress of a run, and the running mean of its episode scores.

    Arguments:
        console: where to print
        rounds, decisions: length of the whole run; the first bar counts decisions if these are not None
        every: rounds between lines if there is no terminal
    """

    def __init__(self, console: Console, *, rounds: int, decisions: int | None = None, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"callbacks.progress.every={every}: must be at least 1.")
        self._console, self._rounds, self._decisions, self._every = console, rounds, decisions, every
        self._score = RunningMean(WINDOW, nan_strategy="disable", sync_on_compute=False)  # all ranks have the same
        columns = (TextColumn("{task.description:>22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = ProgressBars(
            *columns,
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._outer = self._bars.add_task("rounds", total=decisions or rounds)
        self._inner = self._bars.add_task("steps", total=1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._bars.start()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The counters of a resumed run are restored after `setup`."""
        assert isinstance(pl_module, PPO)
        self._bars.update(self._outer, completed=self._completed(pl_module))

    def on_round_start(self, kind: str, episode_seeds: Sequence[int], steps: int) -> None:
        self._bars.reset(self._inner, total=steps, description=f"{kind} steps")

    def on_step(self, action: Tensor, step: Any) -> None:
        self._bars.advance(self._inner)

    def on_round_end(self, rollout: Rollout) -> None:
        self._bars.update(self._inner, completed=rollout.valid.shape[1])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        metrics, counters = pl_module.latest_metrics, pl_module.counters
        self._score.update(metrics["episode/score"])
        running = self._score.compute().item()
        unit = "rounds" if self._decisions is None else "decisions"
        self._bars.update(self._outer, completed=self._completed(pl_module), description=f"{unit}, score {running:.2f}")
        if not self._console.is_terminal and counters.rounds % self._every == 0:
            self._console.print(round_line(counters.rounds, self._rounds, running, metrics))

    def _completed(self, module: PPO) -> int:
        return module.counters.rounds if self._decisions is None else module.counters.decisions

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._bars.stop()


def round_line(done: int, rounds: int, running: float, metrics: dict[str, float]) -> str:
    """One round as a line of text."""
    gain = metrics.get("tasks/gain", math.nan)
    compared = "" if math.isnan(gain) else f"gain {gain:+.2f}  "
    return (
        f"round {done}/{rounds}  score {metrics['episode/score']:.2f} (running {running:.2f})  {compared}"
        f"return {metrics['episode/return']:.2f}  explained variance {metrics['losses/explained_variance']:.2f}  "
        f"kl {metrics.get('policy/kl', 0.0):.4f}  entropy {metrics.get('policy/entropy_op', 0.0):.2f}"
    )
