"""Pages of loggers that need no set-up: a layout of charts, histograms, images, texts and hyperparameters."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from esper.ppo import PPO, Rollout
from esper.records import HELD_OUT, EpisodeRecord
from esper.telemetry.anomalies import DetailWindow
from esper.telemetry.episodes import EpisodeBuffer
from esper.telemetry.health import reevaluate
from esper.telemetry.loggers import LoggerAdapter, adapt
from esper.telemetry.metrics import dashboard_layout
from esper.telemetry.plots import as_array, contributions, frontier, ops_over_rounds
from esper.telemetry.timeline import describe_episode, timeline

HPARAM_METRICS = ("episode/score", "validation/sampled_score", "validation/greedy_score", "losses/explained_variance")


class Dashboard(Callback):
    """Logs settings, histograms, images and texts to every logger that can show them.

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
        self._has_layout = False
        self._rounds: list[int] = []
        self._history: dict[str, list[float]] = {}  # share of each op, by round
        self._ends: dict[str, list[float]] = {"parameters": [], "scores": []}  # final, of all episodes
        self._drawn = 0  # the last round with images

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the settings; a resumed run logs them again."""
        assert isinstance(pl_module, PPO)
        compared = sweep_settings(self._settings)
        for adapter in adapt(trainer.loggers):
            adapter.log_settings(self._settings, compared, HPARAM_METRICS, pl_module.counters.decisions)

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        assert isinstance(batch, Rollout)
        rounds, adapters = pl_module.counters.rounds, adapt(trainer.loggers)
        if not self._has_layout:
            self._has_layout = True
            names = ("score", "gain") if "tasks/gain" in pl_module.latest_metrics else ("score",)
            held_out = [f"validation/{kind}_{name}" for name in names for kind in HELD_OUT]
            layout = dashboard_layout([*pl_module.latest_metrics, *held_out])
            for adapter in adapters:
                adapter.add_layout(layout)
        is_detailed = self._detail_window.is_open(rounds)
        with_histograms = [adapter for adapter in adapters if adapter.shows_histograms]
        if with_histograms and (rounds % self._histograms == 0 or is_detailed):
            self._add_histograms(with_histograms, pl_module, batch, outputs["targets"])
        with_images = [adapter for adapter in adapters if adapter.shows_images]
        if with_images:
            self._append_history(pl_module)
            if rounds % self._images == 0 or is_detailed:
                self._draw(with_images, pl_module)

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        with_images = [adapter for adapter in adapt(trainer.loggers) if adapter.shows_images]
        if with_images and self._history and self._drawn < pl_module.counters.rounds:
            self._draw(with_images, pl_module)

    def _append_history(self, module: PPO) -> None:
        self._rounds.append(module.counters.rounds)
        for op in module.policy.layout.ops:
            self._history.setdefault(op, []).append(module.latest_metrics[f"policy/op_{op}"])
        for episode in self.episode_buffer.latest["training"] if self.episode_buffer is not None else ():
            last = episode.steps[-1]
            if last.score is not None:
                self._ends["parameters"].append(float(episode.parameters))
                self._ends["scores"].append(last.score)

    def _add_histograms(self, adapters: Sequence[LoggerAdapter], module: PPO, rollout: Rollout, targets: Any) -> None:
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
                for adapter in adapters:
                    adapter.add_histogram(tag, values, module.counters.decisions)

    def _draw(self, adapters: Sequence[LoggerAdapter], module: PPO) -> None:
        """Draw every image once, and add it to each logger."""
        rounds, decisions = module.counters.rounds, module.counters.decisions
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
            events = describe_episode(best)
            for adapter in adapters:
                adapter.add_text("events of the best episode", events, decisions)
        for tag, figure in images.items():
            image = as_array(figure)
            for adapter in adapters:
                adapter.add_image(tag, image, decisions)

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self._rounds, "history": self._history, "ends": self._ends, "drawn": self._drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rounds, self._history = state_dict["rounds"], state_dict["history"]
        self._ends, self._drawn = state_dict["ends"], state_dict["drawn"]


def sweep_settings(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """The hyperparameters that runs are compared by: plain values of the groups that sweeps change."""
    groups = ("seed", "gamma", "host", "data", "reward", "actions", "slots", "environment.", "policy.", "ppo.")
    return {
        key: value
        for key, value in settings.items()
        if key.startswith(groups) and isinstance(value, bool | int | float | str) and not key.endswith("_")
        and not str(value).startswith("${") and (key.startswith(groups[-3:]) or "." not in key)
    }  # fmt: skip


def _score(episode: EpisodeRecord) -> float:
    return float("-inf") if episode.score is None else float(episode.score)
