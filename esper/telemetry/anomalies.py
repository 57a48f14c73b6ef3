"""What follows when a round's figures are not well."""

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
    """How closely a run is looked at: more closely for some rounds after a finding."""

    def __init__(self) -> None:
        self.until = 0

    def raised(self, rounds: int) -> bool:
        return rounds <= self.until


class Anomalies(Callback):
    """Looks at every round's figures. A finding is a warning in the log, an event in TensorBoard, and a line in
    `anomalies.jsonl`; for some rounds after it the dashboards are drawn each round.

    Arguments:
        directory: of the run
        attention: raised by findings
        rounds, decisions: of the whole run; decisions may be None
        thresholds: when a figure is not well
        off: checks that are switched off
        on: what follows a finding: `log`, or `stop` to end the run
        closely: rounds for which a finding raises attention
    """

    def __init__(
        self,
        directory: str | Path,
        attention: DetailWindow,
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
            raise ValueError(f"callbacks.anomalies.off={list(off)}: {unknown[0]} is none of {', '.join(CHECKS)}.")
        if on not in ("log", "stop"):
            raise ValueError(f"callbacks.anomalies.on={on}: must be log or stop.")
        try:
            self._thresholds = Thresholds(**thresholds)
        except TypeError as error:
            raise ValueError(f"callbacks.anomalies.thresholds: {error}.") from None
        self._file, self._attention, self._rounds = RoundFile(Path(directory) / "anomalies.jsonl"), attention, rounds
        self._off, self._on, self._closely, self._decisions = tuple(off), on, detail_rounds, decisions
        if not self._thresholds.value or "other" not in self._thresholds.entropy:
            raise ValueError("callbacks.anomalies.thresholds: value must have a pair, and entropy the entry other.")
        self._remembered, self._count = CheckState(), 0

    @rank_zero_only
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PPO)
        self._file.begin(pl_module.counters.rounds)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, PPO)
        assert isinstance(batch, Rollout)
        rounds, targets = pl_module.counters.rounds, outputs["targets"]
        could = reduce_sum(targets.available.sum((0, 1))).tolist()
        heads = dict(zip(batch.layout.head_names, could, strict=True))
        figures = {**pl_module.latest_metrics, **{f"policy/available_{head}": float(n) for head, n in heads.items()}}
        progress = max(rounds / self._rounds, pl_module.counters.decisions / (self._decisions or math.inf))
        found = check_all(figures, self._thresholds, self._remembered, progress, self._off)
        self._count += len(found)
        pl_module.report_metrics({"health/anomalies": self._count})
        anywhere = bool(reduce_sum(torch.tensor(float(len(found)), device=pl_module.device)))
        if anywhere:
            self._attention.until = rounds + self._closely
        for finding in found:
            detail: dict[str, Any] = {}
            if finding.check.startswith("ratio"):
                log_prob, _ = reevaluate(pl_module, batch)
                bounds = {"low": self._thresholds.ratio_low, "high": self._thresholds.ratio_high}
                detail = {"ratios": asdict(RatioDiagnostic.of(log_prob, batch, targets.active, **bounds))}
            self._report(trainer, pl_module, finding, detail)
        if anywhere and self._on == "stop":
            trainer.should_stop = True

    @rank_zero_only
    def _report(self, trainer: Trainer, module: PPO, finding: Finding, detail: Mapping[str, Any]) -> None:
        counters = module.counters
        log.warning("round %d: %s", counters.rounds, finding.sentence)
        where = {"round": counters.rounds, "decisions": counters.decisions}
        value = finding.value if finding.value is None or math.isfinite(finding.value) else None
        self._file.write({**where, **asdict(finding), "value": value, **detail})
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(f"anomaly/{finding.check}", finding.sentence, counters.decisions)

    @rank_zero_only
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        return {"remembered": asdict(self._remembered), "count": self._count, "until": self._attention.until}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._remembered, self._count = CheckState(**state_dict["remembered"]), state_dict["count"]
        self._attention.until = state_dict["until"]
