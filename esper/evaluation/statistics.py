"""Estimates with intervals and p-values.

Scores are passed as strata: one array per task, [controllers, episode seeds]. A row is a trained controller; arms
without one have a single row. The columns are episode seeds, which all arms of a task share. The difference of two arms
that have different trained controllers is [our controllers, their controllers, episode seeds]. NaN marks a missing
episode.

The unit is a controller on a task: a statistic of its episodes, such as their interquartile mean. An estimate is the
mean over controllers and tasks. Its variance is the sum of what controllers and what tasks contribute: that of the
controllers' means divided by their number, and that of the tasks' means divided by theirs. Each part is multiplied by
the square of Student's t for its own number of units, and the root of the sum is half the interval. For independent
normal parts, such an interval covers the true value in at least 95 % of cases, however large each part is (Banerjee,
1960). Degrees of freedom that are estimated from the parts would not: they make 9 % false claims with three
controllers. Noise that both parts contain counts twice, so intervals are too wide rather than too narrow.

With one controller, an interval is valid for that controller only. `fixed_controllers` leaves out the part of
controllers: the interval is then over tasks and episode seeds, and valid for these controllers only. With fewer tasks
than MIN_UNITS it is valid for these tasks only: the second part is then that of episode seeds within each task, by
bootstrap.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

Strata = Sequence[np.ndarray]
Statistic = Callable[[np.ndarray], np.ndarray]  # [..., values] -> [...]
Parts = tuple[tuple[float, int], ...]  # variances that add up, each with its degrees of freedom
SIGNIFICANCE = 0.05  # p-values of claims are below it; intervals are of 95 %
MIN_P_VALUE = 1e-12  # smaller ones are reported as this
QUANTILE_STEPS = 45  # bisections, to about 1e-12 of the quantile
P_VALUE_STEPS = 30  # bisections, to about 1e-8 of the p-value
RESAMPLES = 2_000
MIN_UNITS = 6  # with fewer, all agree at random in more than one case of twenty
TRIM = 0.25  # share of the values that the interquartile mean drops at each end
WORST = 0.1  # share of the episodes that the worst tenth has
CHUNK_VALUES = 1 << 20  # values of resamples in memory at once: 8 MB, and a few copies
FRACTION_TERMS = 300  # far more than the continued fraction of the incomplete beta function needs
SMALLEST = 1e-300


@dataclass(frozen=True)
class Estimate:
    """A value with its interval."""

    value: float
    low: float
    high: float
    parts: Parts = field(default=(), compare=False, repr=False)  # of the variance of the value

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    @property
    def p_value(self) -> float:
        """The significance at which the interval would end at zero; below 5 % where the 95 % interval excludes it."""
        if not self.parts or self.value == 0 or not math.isfinite(self.value):
            return 1.0
        low, high = math.log(MIN_P_VALUE), 0.0
        for _ in range(P_VALUE_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if _reach(self.parts, math.exp(middle)) > abs(self.value) else (low, middle)
        return math.exp(high)

    def bounded(self, low: float, high: float) -> "Estimate":
        """With an interval inside the possible values."""
        return replace(self, low=max(self.low, low), high=min(self.high, high))

    def to_dict(self) -> dict[str, float]:
        """The value and its interval as plain data."""
        return {"value": self.value, "low": self.low, "high": self.high}


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis without a quarter of the values, rounded down, at each end."""
    ordered = np.sort(values, axis=-1)  # NaN last
    count = (~np.isnan(ordered)).sum(-1, keepdims=True)
    cut, places = (TRIM * count).astype(int), np.arange(ordered.shape[-1])
    return mean(np.where((places >= cut) & (places < count - cut), ordered, np.nan))


def mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis without NaN; NaN where no value is left."""
    present = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        result: np.ndarray = np.where(present, values, 0.0).sum(-1) / present.sum(-1)
    return result


def worst_tenth(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis of the lowest tenth of the values, rounded down, of one value at least."""
    ordered = np.sort(values, axis=-1)  # NaN last
    count = np.maximum(1, (WORST * (~np.isnan(ordered)).sum(-1, keepdims=True)).astype(int))
    return mean(np.where(np.arange(ordered.shape[-1]) < count, ordered, np.nan))


def estimate(
    strata: Strata,
    statistic: Statistic = interquartile_mean,
    *,
    resamples: int = RESAMPLES,
    rng_seed: int = 0,
    fixed_controllers: bool = False,
) -> Estimate:
    """The mean over controllers and tasks of a statistic of each controller's episodes, with its interval."""
    full = [_with_their_rows(scores) for scores in strata]
    cells = [statistic(scores) for scores in full]
    seed_parts = [
        (_seed_variance(scores, statistic, resamples, [rng_seed, number]), scores.shape[-1] - 1)
        for number, scores in enumerate(full)
        if len(full) < MIN_UNITS
    ]
    return _with_interval(cells, seed_parts, fixed_controllers=fixed_controllers)


def paired_difference(
    ours: Strata,
    theirs: Strata,
    *,
    resamples: int = RESAMPLES,
    rng_seed: int = 0,
    fixed_controllers: bool = False,
) -> Estimate:
    """Interquartile mean of our score minus theirs on the same episode seed; a single row is paired with every row."""
    gaps = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    return estimate(gaps, resamples=resamples, rng_seed=rng_seed, fixed_controllers=fixed_controllers)


def probability_of_improvement(
    ours: Strata, theirs: Strata, *, resamples: int = RESAMPLES, rng_seed: int = 0
) -> Estimate:
    """Probability that one of our episodes scores above one of theirs on any episode seed of the task.

    It is the Mann-Whitney statistic divided by the number of pairs, of each pair of controllers; ties count half.
    """
    cells, seed_parts = [], []
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        mine, other = np.broadcast_arrays(*map(_with_their_rows, pair))
        size = mine.shape[-1]
        columns = _draw_columns(size, resamples, [rng_seed, number])
        offsets = size * np.arange(resamples)[:, None]
        counts = np.bincount((columns + offsets).ravel(), minlength=resamples * size).reshape(resamples, size)
        rows = [(_share_above(a, b, np.ones((1, size))), _share_above(a, b, counts))
                for a, b in zip(mine.reshape(-1, size), other.reshape(-1, size), strict=True)]  # fmt: skip
        cells.append(np.reshape([observed[0] for observed, _ in rows], mine.shape[:-1]))
        if len(ours) < MIN_UNITS:
            resampled = mean(np.stack([shares for _, shares in rows], axis=-1))
            seed_parts.append((_bootstrap_variance(resampled, size), size - 1))
    return _with_interval(cells, seed_parts).bounded(0, 1)


def performance_profile(strata: Strata, thresholds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of episodes that score above each threshold, and the bounds of its interval; each [thresholds]."""
    found = []
    for threshold in thresholds:
        wins = [np.where(np.isnan(scores), np.nan, scores > threshold) for scores in strata]
        share = estimate(wins, mean).bounded(0, 1)
        found.append((share.value, share.low, share.high))
    shares, low, high = np.array(found).T
    return shares, low, high


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm, 1979): the chance of any false claim among them stays below 5 %."""
    adjusted, largest = list(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(adjusted)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(adjusted) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _with_their_rows(scores: np.ndarray) -> np.ndarray:
    """[our controllers, their controllers, episode seeds]"""
    return scores if scores.ndim == 3 else scores[:, None]


def _draw_columns(count: int, resamples: int, rng_seed: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(rng_seed).integers(count, size=(resamples, count))


def _seed_variance(scores: np.ndarray, statistic: Statistic, resamples: int, rng_seed: Sequence[int]) -> float:
    """What the episode seeds of a task [ours, theirs, episode seeds] add to the variance of its mean over controllers.

    The same episode seeds are drawn for all controllers. Memory does not grow with the number of resamples.
    """
    size = scores.shape[-1]
    if statistic is mean:  # a bootstrap would give the same, up to its random error
        return _mean_variance(mean(np.moveaxis(scores, -1, 0).reshape(size, -1)))
    columns, chunk = _draw_columns(size, resamples, rng_seed), max(1, CHUNK_VALUES // scores.size)
    resampled = []
    for start in range(0, resamples, chunk):
        values = statistic(scores[:, :, columns[start : start + chunk]])  # [ours, theirs, chunk]
        resampled.append(mean(values.reshape(-1, values.shape[-1]).T))
    return _bootstrap_variance(np.concatenate(resampled), size)


def _bootstrap_variance(resampled: np.ndarray, units: int) -> float:
    """The variance of a statistic of `units` values; that of resamples alone is too small by (units - 1) / units."""
    return float(np.nanvar(resampled)) * units / (units - 1) if units > 1 else 0.0


def _mean_variance(values: np.ndarray) -> float:
    """The variance of the mean of independent values, NaN left out; 0 for a single one, whose variance is unknown."""
    present = values[~np.isnan(values)]
    return float(present.var(ddof=1)) / len(present) if len(present) > 1 else 0.0


def _with_interval(
    cells: Sequence[np.ndarray], seed_parts: Sequence[tuple[float, int]], *, fixed_controllers: bool = False
) -> Estimate:
    """The mean of all cells, and its interval.

    cells: for each task, [our controllers, their controllers]; seed_parts: for each task, what its episode seeds add to
    the variance of its mean, and the degrees of freedom; empty if tasks are units themselves; fixed_controllers:
    whether the interval is valid for these controllers only.
    """
    shape = np.max([values.shape for values in cells], axis=0)
    table = np.full((len(cells), *shape), np.nan)  # [tasks, our controllers, their controllers]
    for number, values in enumerate(cells):
        table[number, : values.shape[0], : values.shape[1]] = values
    tasks, ours, theirs = (mean(np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1)) for axis in range(3))
    value = float(mean(tasks))
    parts = [(variance / len(cells) ** 2, freedom) for variance, freedom in seed_parts]
    for units in (*(() if fixed_controllers else (ours, theirs)), *(() if seed_parts else (tasks,))):
        parts.append((_mean_variance(units), int((~np.isnan(units)).sum()) - 1))
    known = tuple((variance, freedom) for variance, freedom in parts if freedom > 0)
    reach = _reach(known, SIGNIFICANCE)
    return Estimate(value, value - reach, value + reach, known)


def _reach(parts: Parts, significance: float) -> float:
    """Half the length of an interval of the given significance."""
    return math.sqrt(sum(variance * student_quantile(freedom, significance) ** 2 for variance, freedom in parts))


def _share_above(ours: np.ndarray, theirs: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[episode seeds], [episode seeds] and how often each resample has each episode seed -> [resamples]"""
    present = ~(np.isnan(ours)[:, None] | np.isnan(theirs)[None])
    wins = np.where(present, (ours[:, None] > theirs[None]) + 0.5 * (ours[:, None] == theirs[None]), 0.0)
    with np.errstate(invalid="ignore"):
        result: np.ndarray = ((counts @ wins) * counts).sum(-1) / ((counts @ present.astype(float)) * counts).sum(-1)
    return result


def student_p_value(t: float, freedom: int) -> float:
    """The probability that Student's t is at least this far from 0, on either side."""
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


@lru_cache(maxsize=1 << 16)
def student_quantile(freedom: int, significance: float = SIGNIFICANCE) -> float:
    """The distance from 0 that Student's t exceeds, on either side, with this probability; by bisection."""
    low, high = math.log(1e-6), math.log(1e15)
    for _ in range(QUANTILE_STEPS):
        middle = (low + high) / 2
        is_below = student_p_value(math.exp(middle), freedom) > significance
        low, high = (middle, high) if is_below else (low, middle)
    return math.exp(high)


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by Lentz's continued fraction (Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return min(max(x, 0.0), 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    numerator, denominator, result = 1.0, 0.0, 1.0
    for index in range(FRACTION_TERMS):
        half, is_odd = divmod(index, 2)
        if index == 0:
            term = 1.0
        elif is_odd:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        denominator = 1 / _away_from_zero(1 + term * denominator)
        numerator = _away_from_zero(1 + term / numerator)
        step = numerator * denominator
        result *= step
        if abs(step - 1) < 1e-14 and index:
            break
    return front * (result - 1) / a


def _away_from_zero(value: float) -> float:
    return value if abs(value) > SMALLEST else SMALLEST
