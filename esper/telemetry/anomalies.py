"""One table of checks, which look at a round's figures and say what is not well."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from esper.ppo import PPO, Rollout
from esper.ppo.agree import summed
from esper.telemetry.health import RatioDiagnostic, second_look
from esper.telemetry.lines import RoundFile

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Thresholds:
    """When a figure is not well.

    Arguments:
        ratio_high, ratio_low: ratios of new to old probability beyond these explode or collapse
        entropy: by head, normalised; `other` for heads not named. Below it for `patience` rounds in a row is a
            collapse, which is over at `recovered` times as much
        kl: a spike above
        value: pairs of progress and explained variance: up to that share of the run, less is a collapsed critic
        drift, momentum: how far, as a factor, the gradient norm may be from its moving average of that momentum
        warmup: rounds that critic and gradients are given before they are judged
        lstm_high, lstm_low: root mean square of the memory
        unearned: steps of an episode in which a seed had credit that it did not earn, by the detectors
        rollbacks: by the governor, in an episode
    """

    ratio_high: float
    ratio_low: float
    entropy: dict[str, float]
    patience: int
    recovered: float
    kl: float
    value: list[list[float]]
    drift: float
    momentum: float
    warmup: int
    lstm_high: float
    lstm_low: float
    unearned: float
    rollbacks: float


@dataclass(frozen=True)
class Finding:
    """Something that is not well."""

    check: str
    tag: str
    value: float | None
    bound: float | None
    sentence: str


@dataclass
class Remembered:
    """What checks know of earlier rounds; plain data."""

    low: dict[str, int] = field(default_factory=dict)  # rounds in a row with too little entropy, by head
    collapsed: dict[str, bool] = field(default_factory=dict)
    norm: float | None = None  # moving average of the gradient norm
    rounds: int = 0
    skipped: float = 0.0


Check = Callable[[Mapping[str, float], Thresholds, Remembered, float], list[Finding]]


def _above(check: str, tag: str, bound: Callable[[Thresholds], float], what: str) -> Check:
    def look(figures: Mapping[str, float], t: Thresholds, remembered: Remembered, progress: float) -> list[Finding]:
        value = figures.get(tag)
        if value is None or not value > bound(t):
            return []
        return [Finding(check, tag, value, bound(t), f"{what}: {tag} is {value:.4g}, above {bound(t):.4g}")]

    return look


def _below(check: str, tag: str, bound: Callable[[Thresholds], float], what: str) -> Check:
    def look(figures: Mapping[str, float], t: Thresholds, remembered: Remembered, progress: float) -> list[Finding]:
        value = figures.get(tag)
        if value is None or not value < bound(t):
            return []
        return [Finding(check, tag, value, bound(t), f"{what}: {tag} is {value:.4g}, below {bound(t):.4g}")]

    return look


def entropy_collapse(
    figures: Mapping[str, float], t: Thresholds, remembered: Remembered, progress: float
) -> list[Finding]:
    """A head that has stopped exploring; a head that nobody could ask is left alone."""
    found = []
    for tag, value in figures.items():
        head = tag.removeprefix("policy/entropy_")
        unknown = head == tag or f"policy/kl_{head}" not in figures or math.isnan(value)
        if unknown or figures.get(f"policy/available_{head}") == 0:
            continue
        bound = t.entropy.get(head, t.entropy["other"])
        if remembered.collapsed.get(head) and value > t.recovered * bound:
            remembered.collapsed[head] = False
        remembered.low[head] = remembered.low.get(head, 0) + 1 if value < bound else 0
        if remembered.low[head] >= t.patience and not remembered.collapsed.get(head):
            remembered.collapsed[head] = True
            sentence = f"the {head} head has stopped exploring: {tag} was below {bound:.4g} for {t.patience} rounds"
            found.append(Finding("entropy_collapse", tag, value, bound, sentence))
    return found


def value_collapse(
    figures: Mapping[str, float], t: Thresholds, remembered: Remembered, progress: float
) -> list[Finding]:
    tag = "losses/explained_variance"
    bound = next((bound for until, bound in t.value if progress <= until), t.value[-1][1])
    value = figures.get(tag)
    if value is None or remembered.rounds <= t.warmup or not value < bound:
        return []
    sentence = f"the critic foretells too little: {tag} is {value:.4g}, below {bound:.4g} at {progress:.0%} of the run"
    return [Finding("value_collapse", tag, value, bound, sentence)]


def gradient_drift(
    figures: Mapping[str, float], t: Thresholds, remembered: Remembered, progress: float
) -> list[Finding]:
    """The gradient norm against its own past."""
    tag = "health/gradient_norm"
    value, past = figures.get(tag), remembered.norm
    if value is None or not math.isfinite(value):
        return []
    remembered.norm = value if past is None else past + (1 - t.momentum) * (value - past)
    if past is None or remembered.rounds <= t.warmup or past / t.drift <= value <= past * t.drift:
        return []
    sentence = f"gradients have drifted: {tag} is {value:.4g}, its moving average {past:.4g}"
    return [Finding("gradient_drift", tag, value, past, sentence)]


def non_finite(figures: Mapping[str, float], t: Thresholds, remembered: Remembered, progress: float) -> list[Finding]:
    """Skipped minibatches, and figures that must be finite."""
    found = []
    skipped = figures.get("health/skipped", 0.0)
    if skipped > remembered.skipped:
        sentence = f"{skipped - remembered.skipped:.0f} minibatches were not finite and were skipped"
        found.append(Finding("non_finite", "health/skipped", skipped, remembered.skipped, sentence))
    remembered.skipped = skipped
    for tag in ("losses/policy", "losses/value", "health/lstm_rms", "episode/return", "episode/score"):
        value = figures.get(tag, 0.0)
        if not math.isfinite(value):
            found.append(Finding("non_finite", tag, None, None, f"{tag} is not finite"))
    return found


CHECKS: dict[str, Check] = {
    "ratio_explosion": _above("ratio_explosion", "policy/ratio_max", lambda t: t.ratio_high, "a ratio explodes"),
    "ratio_collapse": _below("ratio_collapse", "policy/ratio_min", lambda t: t.ratio_low, "a ratio collapses"),
    "entropy_collapse": entropy_collapse,
    "kl_spike": _above("kl_spike", "policy/kl", lambda t: t.kl, "the policy jumped"),
    "value_collapse": value_collapse,
    "gradient_drift": gradient_drift,
    "non_finite": non_finite,
    "lstm_saturation": _above("lstm_saturation", "health/lstm_rms", lambda t: t.lstm_high, "the memory saturates"),
    "lstm_death": _below("lstm_death", "health/lstm_rms", lambda t: t.lstm_low, "the memory is empty"),
    "reward_hacking": _above(
        "reward_hacking",
        "seeds/finding_reward_hacking",
        lambda t: t.unearned,
        "seeds get more credit than there is",
    ),
    "ransomware": _above(
        "ransomware", "seeds/finding_ransomware", lambda t: t.unearned, "seeds made themselves needed without helping"
    ),
    "rollbacks": _above("rollbacks", "seeds/rollbacks", lambda t: t.rollbacks, "the governor brought hosts back"),
}


def check_all(
    figures: Mapping[str, float], thresholds: Thresholds, remembered: Remembered, progress: float, off: Sequence[str]
) -> list[Finding]:
    """Every check that is not switched off, on one round's figures."""
    remembered.rounds += 1
    return [
        finding
        for name, check in CHECKS.items()
        if name not in off
        for finding in check(figures, thresholds, remembered, progress)
    ]


class Attention:
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
        attention: Attention,
        rounds: int,
        decisions: int | None,
        *,
        thresholds: Mapping[str, Any],
        off: Sequence[str],
        on: str,
        closely: int,
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
        self._off, self._on, self._closely, self._decisions = tuple(off), on, closely, decisions
        if not self._thresholds.value or "other" not in self._thresholds.entropy:
            raise ValueError("callbacks.anomalies.thresholds: value must have a pair, and entropy the entry other.")
        self._remembered, self._count = Remembered(), 0

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
        could = summed(targets.available.sum((0, 1))).tolist()
        heads = dict(zip(batch.layout.head_names, could, strict=True))
        figures = {**pl_module.latest, **{f"policy/available_{head}": float(n) for head, n in heads.items()}}
        progress = max(rounds / self._rounds, pl_module.counters.decisions / (self._decisions or math.inf))
        found = check_all(figures, self._thresholds, self._remembered, progress, self._off)
        self._count += len(found)
        pl_module.report({"health/anomalies": self._count})
        anywhere = bool(summed(torch.tensor(float(len(found)), device=pl_module.device)))
        if anywhere:
            self._attention.until = rounds + self._closely
        for finding in found:
            detail: dict[str, Any] = {}
            if finding.check.startswith("ratio"):
                log_prob, _ = second_look(pl_module, batch)
                bounds = {"low": self._thresholds.ratio_low, "high": self._thresholds.ratio_high}
                detail = {"ratios": asdict(RatioDiagnostic.of(log_prob, batch, targets.active, **bounds))}
            self._tell(trainer, pl_module, finding, detail)
        if anywhere and self._on == "stop":
            trainer.should_stop = True

    @rank_zero_only
    def _tell(self, trainer: Trainer, module: PPO, finding: Finding, detail: Mapping[str, Any]) -> None:
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
        self._remembered, self._count = Remembered(**state_dict["remembered"]), state_dict["count"]
        self._attention.until = state_dict["until"]
