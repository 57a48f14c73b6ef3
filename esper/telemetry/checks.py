"""Anomaly checks: one table of functions that compare a round's metrics with thresholds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the checks.

    Arguments:
        ratio_high, ratio_low: limits of the ratio of new to old probability
        entropy: minimum normalised entropy by head; `other` for heads not named
        patience: consecutive rounds below the minimum entropy that are a collapse
        recovery_factor: a collapse is over when entropy exceeds this times its minimum
        kl: maximum KL of an update
        value: pairs of progress and minimum explained variance; a pair applies up to that share of the run
        drift: maximum factor between the gradient norm and its moving average
        momentum: momentum of that moving average
        warmup: rounds before the critic and the gradient norm are checked
        lstm_high, lstm_low: limits of the root mean square of the LSTM state
        unearned_steps: maximum number of steps per episode in which a detector finds credit that a seed did not earn
        rollbacks: maximum number of rollbacks by the governor per episode
    """

    ratio_high: float
    ratio_low: float
    entropy: dict[str, float]
    patience: int
    recovery_factor: float
    kl: float
    value: Sequence[tuple[float, float]]
    drift: float
    momentum: float
    warmup: int
    lstm_high: float
    lstm_low: float
    unearned_steps: float
    rollbacks: float

    def __post_init__(self) -> None:
        if not self.value:
            raise ValueError("callbacks.anomalies.thresholds.value=[]: must have at least one pair.")
        if "other" not in self.entropy:
            raise ValueError(f"callbacks.anomalies.thresholds.entropy={self.entropy}: must have a key other.")


@dataclass(frozen=True)
class Finding:
    """An anomaly in a round's metrics."""

    check: str
    tag: str
    value: float | None
    bound: float | None
    sentence: str


@dataclass
class CheckState:
    """What checks remember of earlier rounds; plain data, saved in checkpoints."""

    low: dict[str, int] = field(default_factory=dict)  # consecutive rounds with too little entropy, by head
    collapsed: dict[str, bool] = field(default_factory=dict)  # by head
    norm: float | None = None  # moving average of the gradient norm
    rounds: int = 0  # checked so far
    skipped: float = 0.0  # minibatches, so far


Check = Callable[[Mapping[str, float], Thresholds, CheckState, float], list[Finding]]


def _make_limit(check: str, tag: str, bound: Callable[[Thresholds], float], what: str, *, above: bool) -> Check:
    """A check that a metric does not exceed a bound, or does not fall below it."""
    word, sign = ("above", 1) if above else ("below", -1)

    def check_limit(
        metrics: Mapping[str, float], thresholds: Thresholds, state: CheckState, progress: float
    ) -> list[Finding]:
        value, limit = metrics.get(tag), bound(thresholds)
        if value is None or not sign * value > sign * limit:
            return []
        return [Finding(check, tag, value, limit, f"{what}: {tag} is {value:.4g}, {word} {limit:.4g}")]

    return check_limit


_above, _below = partial(_make_limit, above=True), partial(_make_limit, above=False)


def check_entropy(
    metrics: Mapping[str, float], thresholds: Thresholds, state: CheckState, progress: float
) -> list[Finding]:
    """A head has stopped exploring; heads that were available on no step are not checked."""
    findings = []
    for tag, value in metrics.items():
        head = tag.removeprefix("policy/entropy_")
        is_head = head != tag and f"policy/kl_{head}" in metrics
        if not is_head or math.isnan(value) or metrics.get(f"policy/available_{head}") == 0:
            continue
        bound = thresholds.entropy.get(head, thresholds.entropy["other"])
        if state.collapsed.get(head) and value > thresholds.recovery_factor * bound:
            state.collapsed[head] = False
        state.low[head] = state.low.get(head, 0) + 1 if value < bound else 0
        if state.low[head] >= thresholds.patience and not state.collapsed.get(head):
            state.collapsed[head] = True
            rounds = f"{thresholds.patience} rounds"
            sentence = f"the {head} head has stopped exploring: {tag} was below {bound:.4g} for {rounds}"
            findings.append(Finding("entropy_collapse", tag, value, bound, sentence))
    return findings


def check_critic(
    metrics: Mapping[str, float], thresholds: Thresholds, state: CheckState, progress: float
) -> list[Finding]:
    """The critic's explained variance is below its minimum at this point of the run."""
    tag = "losses/explained_variance"
    bound = next((bound for until, bound in thresholds.value if progress <= until), thresholds.value[-1][1])
    value = metrics.get(tag)
    if value is None or state.rounds <= thresholds.warmup or not value < bound:
        return []
    sentence = (
        f"the critic is far worse than a constant: {tag} is {value:.4g}, below {bound:.4g} at {progress:.0%} of the run"
    )
    return [Finding("value_collapse", tag, value, bound, sentence)]


def check_gradient_norm(
    metrics: Mapping[str, float], thresholds: Thresholds, state: CheckState, progress: float
) -> list[Finding]:
    """The gradient norm is far from its moving average."""
    tag = "health/gradient_norm"
    value, past = metrics.get(tag), state.norm
    if value is None or not math.isfinite(value):
        return []
    state.norm = value if past is None else past + (1 - thresholds.momentum) * (value - past)
    if past is None or state.rounds <= thresholds.warmup or past / thresholds.drift <= value <= past * thresholds.drift:
        return []
    sentence = f"the gradient norm has drifted: {tag} is {value:.4g}, its moving average {past:.4g}"
    return [Finding("gradient_drift", tag, value, past, sentence)]


def check_finite(
    metrics: Mapping[str, float], thresholds: Thresholds, state: CheckState, progress: float
) -> list[Finding]:
    """Minibatches were skipped, or a metric that must be finite is not."""
    findings = []
    skipped = metrics.get("health/skipped", 0.0)
    if skipped > state.skipped:
        sentence = f"{skipped - state.skipped:.0f} minibatches had non-finite values and were skipped"
        findings.append(Finding("non_finite", "health/skipped", skipped, state.skipped, sentence))
    state.skipped = skipped
    for tag in ("losses/policy", "losses/value", "health/lstm_rms", "episode/return", "episode/score"):
        value = metrics.get(tag, 0.0)
        if not math.isfinite(value):
            findings.append(Finding("non_finite", tag, None, None, f"{tag} is non-finite"))
    return findings


CHECKS: dict[str, Check] = {
    "ratio_explosion": _above("ratio_explosion", "policy/ratio_max", lambda t: t.ratio_high, "a ratio explodes"),
    "ratio_collapse": _below("ratio_collapse", "policy/ratio_min", lambda t: t.ratio_low, "a ratio collapses"),
    "entropy_collapse": check_entropy,
    "kl_spike": _above("kl_spike", "policy/kl", lambda t: t.kl, "an update was too large"),
    "value_collapse": check_critic,
    "gradient_drift": check_gradient_norm,
    "non_finite": check_finite,
    "lstm_saturation": _above("lstm_saturation", "health/lstm_rms", lambda t: t.lstm_high, "the LSTM state saturates"),
    "lstm_death": _below("lstm_death", "health/lstm_rms", lambda t: t.lstm_low, "the LSTM state is near 0"),
    "reward_hacking": _above(
        "reward_hacking",
        "seeds/finding_reward_hacking",
        lambda t: t.unearned_steps,
        "seeds get more credit than the host has gained",
    ),
    "ransomware": _above(
        "ransomware",
        "seeds/finding_ransomware",
        lambda t: t.unearned_steps,
        "the host depends on seeds that do not improve it",
    ),
    "rollbacks": _above("rollbacks", "seeds/rollbacks", lambda t: t.rollbacks, "the governor rolled hosts back"),
}


def check_all(
    metrics: Mapping[str, float], thresholds: Thresholds, state: CheckState, progress: float, off: Sequence[str]
) -> list[Finding]:
    """Run every check that is not in `off` on one round's metrics; `progress` is the finished share of the run."""
    state.rounds += 1
    return [
        finding
        for name, check in CHECKS.items()
        if name not in off
        for finding in check(metrics, thresholds, state, progress)
    ]
