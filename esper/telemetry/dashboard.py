"""TensorBoard pages that need no set-up: a layout of charts, histograms, images, texts and hyperparameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.utils.tensorboard.summary import hparams
from torch.utils.tensorboard.writer import SummaryWriter

from esper.ppo import PPO, Rollout
from esper.records import HELD_OUT, EpisodeRecord
from esper.telemetry.anomalies import DetailWindow
from esper.telemetry.episodes import EpisodeBuffer
from esper.telemetry.health import reevaluate
from esper.telemetry.metrics import dashboard_layout
from esper.telemetry.plots import as_array, contributions, frontier, ops_over_rounds
from esper.telemetry.timeline import describe_episode, timeline

HPARAM_METRICS = ("episode/score", "validation/sampled_score", "validation/greedy_score", "losses/explained_variance")


class Dashboard(Callback):
    """Fills TensorBoard, if it is one of the loggers.

    Arguments:
        settings: the run's configuration, flat
        episodes: buffer of the latest episodes; None if no hosts grow
        detail_window: while it is open, everything is drawn each round
        histograms: rounds between histograms
        images: rounds between images and texts; the last round also has them
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        episodes: EpisodeBuffer | None,
        detail_window: DetailWindow,
        *,
        histograms: int,
        images: int,
    ) -> None:
        for name, every in (("histograms", histograms), ("images", images)):
            if every < 1:
                raise ValueError(f"callbacks.dashboard.{name}={every}: must be at least 1.")
        self._settings, self.episode_buffer, self._detail_window = dict(settings), episodes, detail_window
        self._histograms, self._images = histograms, images
        self._has_header = False
        self._rounds: list[int] = []
        self._history: dict[str, list[float]] = {}  # share of each op, by round
        self._ends: dict[str, list[float]] = {"parameters": [], "scores": []}  # final, of all episodes
        self._drawn = 0  # the last round with images

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        assert isinstance(batch, Rollout)
        writer = _writer(trainer)
        if writer is None:
            return
        rounds, decisions = pl_module.counters.rounds, pl_module.counters.decisions
        if not self._has_header:
            self._has_header = True
            self._write_header(writer, pl_module)
        self._append_history(pl_module)
        if rounds % self._histograms == 0 or self._detail_window.is_open(rounds):
            self._add_histograms(writer, pl_module, batch, outputs["targets"], decisions)
        if rounds % self._images == 0 or self._detail_window.is_open(rounds):
            self._draw(writer, pl_module, rounds, decisions)

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        writer = _writer(trainer)
        if writer is not None and self._history and self._drawn < pl_module.counters.rounds:
            self._draw(writer, pl_module, pl_module.counters.rounds, pl_module.counters.decisions)

    def _write_header(self, writer: SummaryWriter, module: PPO) -> None:
        """Write layout, configuration and hyperparameters; a resumed run writes them again."""
        held_out = [f"validation/{kind}_score" for kind in HELD_OUT]
        writer.add_custom_scalars(dashboard_layout([*module.latest_metrics, *held_out]))
        rows = [f"| {key} | {value} |" for key, value in self._settings.items()]
        writer.add_text("config", "\n".join(["| key | value |", "|---|---|", *rows]), module.counters.decisions)
        for summary in hparams(sweep_settings(self._settings), dict.fromkeys(HPARAM_METRICS)):  # type: ignore[no-untyped-call]
            writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]

    def _append_history(self, module: PPO) -> None:
        self._rounds.append(module.counters.rounds)
        for op in module.policy.layout.ops:
            self._history.setdefault(op, []).append(module.latest_metrics[f"policy/op_{op}"])
        for episode in self.episode_buffer.latest["training"] if self.episode_buffer is not None else ():
            last = episode.steps[-1]
            if last.score is not None:
                self._ends["parameters"].append(float(episode.parameters))
                self._ends["scores"].append(last.score)

    def _add_histograms(
        self, writer: SummaryWriter, module: PPO, rollout: Rollout, targets: Any, decisions: int
    ) -> None:
        log_prob, _ = reevaluate(module, rollout)
        uses = rollout.layout.uses(rollout.action.device)[rollout.select_head("op")] & rollout.valid.unsqueeze(-1)
        histograms: dict[str, Tensor] = {
            f"actions/{head}": rollout.action[..., index][uses[..., index]]
            for index, head in enumerate(rollout.layout.head_names)
        }
        histograms["learning/advantages"] = targets.advantages[targets.decision]
        histograms["learning/values"] = module.scale.denormalise(targets.values)[rollout.valid]
        histograms["learning/ratios"] = (log_prob - rollout.log_prob).exp()[targets.active]
        for tag, values in histograms.items():
            if values.numel() and values.isfinite().all():
                writer.add_histogram(tag, values, decisions)

    def _draw(self, writer: SummaryWriter, module: PPO, rounds: int, decisions: int) -> None:
        self._drawn = rounds
        images = {"pictures/ops": ops_over_rounds(self._rounds, self._history)}
        if self.episode_buffer is not None:
            episodes = sorted(self.episode_buffer.latest["training"], key=_score)
            worst, best = episodes[0], episodes[-1]
            titled = {f"{name} of round {rounds}: score {_score(each):.2f}": each
                      for name, each in (("best", best), ("worst", worst))}  # fmt: skip
            images["pictures/timeline"] = timeline(titled)
            images["pictures/contribution"] = contributions(episodes)
            if self._ends["scores"]:
                images["pictures/frontier"] = frontier(self._ends["parameters"], self._ends["scores"])
            writer.add_text("events of the best episode", describe_episode(best), decisions)
        for tag, figure in images.items():
            writer.add_image(tag, as_array(figure), decisions, dataformats="HWC")

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self._rounds, "history": self._history, "ends": self._ends, "drawn": self._drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rounds, self._history = state_dict["rounds"], state_dict["history"]
        self._ends, self._drawn = state_dict["ends"], state_dict["drawn"]


def sweep_settings(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The hyperparameters that TensorBoard compares runs by: plain values of the groups that sweeps change."""
    groups = ("seed", "gamma", "host", "data", "reward", "actions", "slots", "environment.", "policy.", "ppo.")
    return {
        key: value
        for key, value in settings.items()
        if key.startswith(groups) and isinstance(value, bool | int | float | str) and not key.endswith("_")
        and not str(value).startswith("${") and (key.startswith(groups[-3:]) or "." not in key)
    }  # fmt: skip


def _score(episode: EpisodeRecord) -> float:
    return float("-inf") if episode.score is None else float(episode.score)


def _writer(trainer: Trainer) -> SummaryWriter | None:
    loggers: Sequence[Any] = trainer.loggers
    return next((logger.experiment for logger in loggers if isinstance(logger, TensorBoardLogger)), None)
