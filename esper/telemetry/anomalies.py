"""Anomaly detection: runs the checks on every round's metrics and reports what they find."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from esper.ppo import PPO, Rollout
from esper.ppo.distributed import reduce_sum
from esper.telemetry.checks import CHECKS, CheckState, Finding, Thresholds, check_all
from esper.telemetry.health import RatioDiagnostic, reevaluate
from esper.telemetry.loggers import adapt
from esper.telemetry.round_file import RoundFile

log = logging.getLogger(__name__)

REPEATS = 10  # of the same finding, the first and every tenth are reported
QUIET_ROUNDS = 10  # without a finding, after which it counts from 1 again


class DetailWindow:
    """The rounds after a finding in which the dashboard draws everything."""

    def __init__(self) -> None:
        self.last_round = 0

    def is_open(self, rounds: int) -> bool:
        return rounds <= self.last_round


class RepeatCounter:
    """Counts repeated findings by check and metric, to report the first and every tenth.

    A finding that was absent for more than `QUIET_ROUNDS` rounds counts from 1 again.
    """

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}  # count, and the last round with the finding

    def count(self, finding: Finding, rounds: int) -> int:
        """How often the finding was made, this time included."""
        key = f"{finding.check} {finding.tag}"
        count, last = self._counts.get(key, (0, rounds))
        self._counts[key] = [1 if rounds - last > QUIET_ROUNDS else count + 1, rounds]
        return self._counts[key][0]

    def state_dict(self) -> dict[str, list[int]]:
        return {key: list(entry) for key, entry in self._counts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Sequence[int]]) -> None:
        self._counts = {key: list(entry) for key, entry in state_dict.items()}


class Anomalies(Callback):
    """Checks every round's metrics for anomalies.

    A finding is a warning in the log, a text in the loggers and a line in `anomalies.jsonl`. For some rounds after it
    the dashboard draws everything. A finding that repeats is reported the first time and every tenth time, with its
    count; `health/anomalies` counts all.

    Arguments:
        directory: directory of the run
        detail_window: opened by findings
        rounds, decisions: length of the whole run; decisions may be None
        thresholds: of the checks
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
        thresholds: Thresholds,
        off: Sequence[str],
        on: Literal["log", "stop"],
        detail_rounds: int,
    ) -> None:
        unknown = [name for name in off if name not in CHECKS]
        if unknown:
            raise ValueError(f"callbacks.anomalies.off={list(off)}: {unknown[0]} must be one of {', '.join(CHECKS)}.")
        self._file = RoundFile(Path(directory) / "anomalies.jsonl")
        self._thresholds, self._detail_window, self._rounds = thresholds, detail_window, rounds
        self._off, self._on, self._detail_rounds, self._decisions = tuple(off), on, detail_rounds, decisions
        self._state, self._repeats, self._count = CheckState(), RepeatCounter(), 0

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
        counts_by_finding = [(finding, self._repeats.count(finding, rounds)) for finding in findings]
        reported = [(finding, count) for finding, count in counts_by_finding if count == 1 or count % REPEATS == 0]
        numbers = torch.tensor([float(len(findings)), float(len(reported))], device=pl_module.device)
        found_on_any_rank, reported_on_any_rank = map(bool, reduce_sum(numbers).tolist())
        if reported_on_any_rank:
            self._detail_window.last_round = rounds + self._detail_rounds
        for finding, count in reported:
            detail: dict[str, Any] = {}
            if finding.check.startswith("ratio"):
                log_prob, _ = reevaluate(pl_module, batch)
                bounds = {"low": self._thresholds.ratio_low, "high": self._thresholds.ratio_high}
                detail = {"ratios": asdict(RatioDiagnostic.of(log_prob, batch, targets.active, **bounds))}
            self._report(trainer, pl_module, finding, count, detail)
        if found_on_any_rank and self._on == "stop":
            trainer.should_stop = True

    @rank_zero_only
    def _report(self, trainer: Trainer, module: PPO, finding: Finding, count: int, detail: Mapping[str, Any]) -> None:
        counters = module.counters
        sentence = finding.sentence if count == 1 else f"{finding.sentence} ({count} times so far)"
        log.warning("round %d: %s", counters.rounds, sentence)
        position = {"round": counters.rounds, "decisions": counters.decisions}
        value = finding.value if finding.value is None or math.isfinite(finding.value) else None
        self._file.write({**position, **asdict(finding), "value": value, "count": count, **detail})
        for adapter in adapt(trainer.loggers):
            adapter.add_text(f"anomaly/{finding.check}", sentence, counters.decisions)

    @rank_zero_only
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            "remembered": asdict(self._state),
            "count": self._count,
            "until": self._detail_window.last_round,
            "repeats": self._repeats.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state, self._count = CheckState(**state_dict["remembered"]), state_dict["count"]
        self._detail_window.last_round = state_dict["until"]
        self._repeats.load_state_dict(state_dict.get("repeats", {}))  # absent in runs of 0.1
