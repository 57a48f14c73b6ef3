"""Anomaly detection: runs the checks on every round's metrics and reports what they find."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from esper.ppo import PPO, Rollout
from esper.ppo.distributed import reduce_sum
from esper.telemetry.checks import CHECKS, CheckState, Finding, Thresholds, check_all
from esper.telemetry.health import RatioDiagnostic, reevaluate
from esper.telemetry.round_file import RoundFile

log = logging.getLogger(__name__)


class DetailWindow:
    """The rounds after a finding in which the dashboard draws everything."""

    def __init__(self) -> None:
        self.last_round = 0

    def is_open(self, rounds: int) -> bool:
        return rounds <= self.last_round


class Anomalies(Callback):
    """Checks every round's metrics for anomalies.

    A finding is a warning in the log, a text in TensorBoard and a line in `anomalies.jsonl`. For some rounds after it
    the dashboard draws everything.

    Arguments:
        directory: directory of the run
        detail_window: opened by findings
        rounds, decisions: length of the whole run; decisions may be None
        thresholds: arguments of `Thresholds`
        off: checks that are switched off
        on: what to do about a finding: `log`, or `stop` to end the run as well
        detail_rounds: rounds after a finding in which the dashboard draws everything
    """

    def __init__(
        self,
        directory: str | Path,
        detail_window: DetailWindow,
        rounds: int,
        decisions: int | None,
        *,
        thresholds: Mapping[str, Any],
        off: Sequence[str],
        on: str,
        detail_rounds: int,
    ) -> None:
        unknown = [name for name in off if name not in CHECKS]
        if unknown:
            raise ValueError(f"callbacks.anomalies.off={list(off)}: {unknown[0]} must be one of {', '.join(CHECKS)}.")
        if on not in ("log", "stop"):
            raise ValueError(f"callbacks.anomalies.on={on}: must be log or stop.")
        try:
            self._thresholds = Thresholds(**thresholds)
        except TypeError as error:
            raise ValueError(f"callbacks.anomalies.thresholds: {error}.") from None
        self._file, self._detail_window, self._rounds = (
            RoundFile(Path(directory) / "anomalies.jsonl"),
            detail_window,
            rounds,
        )
        self._off, self._on, self._detail_rounds, self._decisions = tuple(off), on, detail_rounds, decisions
        if not self._thresholds.value or "other" not in self._thresholds.entropy:
            raise ValueError(
                "callbacks.anomalies.thresholds: value must have a pair, and entropy must have a key other."
            )
        self._state, self._count = CheckState(), 0

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        self._file.open_after(pl_module.counters.rounds)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        assert isinstance(batch, Rollout)
        rounds, targets = pl_module.counters.rounds, outputs["targets"]
        counts = reduce_sum(targets.available.sum((0, 1))).tolist()
        available = dict(zip(batch.layout.head_names, counts, strict=True))
        metrics = {
            **pl_module.latest_metrics,
            **{f"policy/available_{head}": float(n) for head, n in available.items()},
        }
        progress = max(rounds / self._rounds, pl_module.counters.decisions / (self._decisions or math.inf))
        findings = check_all(metrics, self._thresholds, self._state, progress, self._off)
        self._count += len(findings)
        pl_module.report_metrics({"health/anomalies": self._count})
        on_any_rank = bool(reduce_sum(torch.tensor(float(len(findings)), device=pl_module.device)))
        if on_any_rank:
            self._detail_window.last_round = rounds + self._detail_rounds
        for finding in findings:
            detail: dict[str, Any] = {}
            if finding.check.startswith("ratio"):
                log_prob, _ = reevaluate(pl_module, batch)
                bounds = {"low": self._thresholds.ratio_low, "high": self._thresholds.ratio_high}
                detail = {"ratios": asdict(RatioDiagnostic.of(log_prob, batch, targets.active, **bounds))}
            self._report(trainer, pl_module, finding, detail)
        if on_any_rank and self._on == "stop":
            trainer.should_stop = True

    @rank_zero_only
    def _report(self, trainer: Trainer, module: PPO, finding: Finding, detail: Mapping[str, Any]) -> None:
        counters = module.counters
        log.warning("round %d: %s", counters.rounds, finding.sentence)
        position = {"round": counters.rounds, "decisions": counters.decisions}
        value = finding.value if finding.value is None or math.isfinite(finding.value) else None
        self._file.write({**position, **asdict(finding), "value": value, **detail})
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(f"anomaly/{finding.check}", finding.sentence, counters.decisions)

    @rank_zero_only
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        return {"remembered": asdict(self._state), "count": self._count, "until": self._detail_window.last_round}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state, self._count = CheckState(**state_dict["remembered"]), state_dict["count"]
        self._detail_window.last_round = state_dict["until"]
