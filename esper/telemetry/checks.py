"""One table of checks, which look at a round's figures and say what is not well."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial


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
    recovery_factor: float
    kl: float
    value: list[list[float]]
    drift: float
    momentum: float
    warmup: int
    lstm_high: float
    lstm_low: float
    unearned_steps: float
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
class CheckState:
    """What checks know of earlier rounds; plain data."""

    low: dict[str, int] = field(default_factory=dict)  # rounds in a row with too little entropy, by head
    collapsed: dict[str, bool] = field(default_factory=dict)
    norm: float | None = None  # moving average of the gradient norm
    rounds: int = 0
    skipped: float = 0.0


Check = Callable[[Mapping[str, float], Thresholds, CheckState, float], list[Finding]]


def _limit(check: str, tag: str, bound: Callable[[Thresholds], float], what: str, *, above: bool) -> Check:
    """A figure that must not pass a bound."""
    word, sign = ("above", 1) if above else ("below", -1)

    def look(figures: Mapping[str, float], t: Thresholds, remembered: CheckState, progress: float) -> list[Finding]:
        value, limit = figures.get(tag), bound(t)
        if value is None or not sign * value > sign * limit:
            return []
        return [Finding(check, tag, value, limit, f"{what}: {tag} is {value:.4g}, {word} {limit:.4g}")]

    return look


_above, _below = partial(_limit, above=True), partial(_limit, above=False)


def entropy_collapse(
    figures: Mapping[str, float], t: Thresholds, remembered: CheckState, progress: float
) -> list[Finding]:
    """A head that has stopped exploring; a head that nobody could ask is left alone."""
    found = []
    for tag, value in figures.items():
        head = tag.removeprefix("policy/entropy_")
        unknown = head == tag or f"policy/kl_{head}" not in figures or math.isnan(value)
        if unknown or figures.get(f"policy/available_{head}") == 0:
            continue
        bound = t.entropy.get(head, t.entropy["other"])
        if remembered.collapsed.get(head) and value > t.recovery_factor * bound:
            remembered.collapsed[head] = False
        remembered.low[head] = remembered.low.get(head, 0) + 1 if value < bound else 0
        if remembered.low[head] >= t.patience and not remembered.collapsed.get(head):
            remembered.collapsed[head] = True
            sentence = f"the {head} head has stopped exploring: {tag} was below {bound:.4g} for {t.patience} rounds"
            found.append(Finding("entropy_collapse", tag, value, bound, sentence))
    return found


def value_collapse(
    figures: Mapping[str, float], t: Thresholds, remembered: CheckState, progress: float
) -> list[Finding]:
    tag = "losses/explained_variance"
    bound = next((bound for until, bound in t.value if progress <= until), t.value[-1][1])
    value = figures.get(tag)
    if value is None or remembered.rounds <= t.warmup or not value < bound:
        return []
    sentence = f"the critic foretells too little: {tag} is {value:.4g}, below {bound:.4g} at {progress:.0%} of the run"
    return [Finding("value_collapse", tag, value, bound, sentence)]


def gradient_drift(
    figures: Mapping[str, float], t: Thresholds, remembered: CheckState, progress: float
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


def non_finite(figures: Mapping[str, float], t: Thresholds, remembered: CheckState, progress: float) -> list[Finding]:
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
        lambda t: t.unearned_steps,
        "seeds get more credit than there is",
    ),
    "ransomware": _above(
        "ransomware",
        "seeds/finding_ransomware",
        lambda t: t.unearned_steps,
        "seeds made themselves needed without helping",
    ),
    "rollbacks": _above("rollbacks", "seeds/rollbacks", lambda t: t.rollbacks, "the governor brought hosts back"),
}


def check_all(
    figures: Mapping[str, float], thresholds: Thresholds, remembered: CheckState, progress: float, off: Sequence[str]
) -> list[Finding]:
    """Every check that is not switched off, on one round's figures."""
    remembered.rounds += 1
    return [
        finding
        for name, check in CHECKS.items()
        if name not in off
        for finding in check(figures, thresholds, remembered, progress)
    ]
