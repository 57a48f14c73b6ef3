"""What scores say, and how sure that is.

Scores come as strata, one for each task, each an array [controllers, seeds]: one row for each trained controller, or
one in all for rules that are not trained; the columns are episode seeds, which all arms of a task share. Where two arms
have controllers of their own, it is [ours, theirs, seeds]. NaN is an episode that was not played: it is no part of any
draw.

An interval is a percentile bootstrap, widened for few units, in which controllers are drawn anew as wholes, the same
for all tasks, since they are what was trained several times, and within each task the seeds, the same for all arms
that are compared. With one controller it speaks of that controller alone. A figure of several tasks is the mean over
them: an interquartile mean of all their values would cut off what is large in one task alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Strata = Sequence[np.ndarray]
Statistic = Callable[[np.ndarray], np.ndarray]  # [..., values] -> [...]
NORMAL = NormalDist()
LEVEL = 0.95
DRAWS = 2_000
MIN_UNITS = 6  # units; fewer agree by chance in more than one case of twenty, and their intervals are not to be trusted
TRIM = 0.25  # of the values at each end, that the interquartile mean leaves out


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last axis of what is left when a quarter, rounded down, is cut off at either end."""
    ordered = np.sort(values, axis=-1)  # NaN last
    count = (~np.isnan(ordered)).sum(-1, keepdims=True)
    cut, places = (TRIM * count).astype(int), np.arange(ordered.shape[-1])
    return mean(np.where((places >= cut) & (places < count - cut), ordered, np.nan))


def mean(values: np.ndarray) -> np.ndarray:
    """Over the last axis; NaN where there is nothing."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        found: np.ndarray = np.where(there, values, 0.0).sum(-1) / there.sum(-1)
    return found


def estimate(
    strata: Strata, statistic: Statistic = interquartile_mean, *, draws: int = DRAWS, rng_seed: int = 0
) -> Estimate:
    """A statistic of each task's values, as the mean over tasks, with its interval."""
    seen = [statistic(scores.ravel()) for scores in strata]
    found = [statistic(part) for part in _drawn(strata, draws, rng_seed)]
    return _estimate(np.mean(seen, axis=0), np.mean(found, axis=0), bounds(strata))


def difference(ours: Strata, theirs: Strata, *, draws: int = DRAWS, rng_seed: int = 0) -> Estimate:
    """Interquartile mean of our score less theirs on the same seed; a single row is compared with every other's."""
    return estimate([mine - other for mine, other in zip(ours, theirs, strict=True)], draws=draws, rng_seed=rng_seed)


def probability_of_improvement(ours: Strata, theirs: Strata, *, draws: int = DRAWS, rng_seed: int = 0) -> Estimate:
    """Probability that an episode of ours scores above one of theirs on any seed, ties half; the mean over tasks.

    It is the Mann-Whitney statistic over the number of pairs.
    """
    pairs = zip(_drawn(ours, draws, rng_seed), _drawn(theirs, draws, rng_seed), strict=True)  # one seed: the same draws
    found = [_above(mine, other) for mine, other in pairs]
    seen = [_above(mine.reshape(1, -1), other.reshape(1, -1))[0] for mine, other in zip(ours, theirs, strict=True)]
    return _estimate(np.mean(seen), np.mean(found, axis=0), bounds(ours))


def profile(
    strata: Strata, thresholds: np.ndarray, *, draws: int = DRAWS, rng_seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of episodes that score above each threshold, with the bounds of its interval; each [thresholds]."""
    seen = np.concatenate([scores.ravel() for scores in strata])
    drawn = np.concatenate(_drawn(strata, draws, rng_seed), axis=-1)
    shares = np.array([_share(seen > threshold, seen) for threshold in thresholds])
    found = np.array([_share(drawn > threshold, drawn) for threshold in thresholds])  # [thresholds, draws]
    low, high = np.nanquantile(found, bounds(strata), axis=-1)
    return shares, low, high


def _drawn(strata: Strata, draws: int, rng_seed: int) -> list[np.ndarray]:
    """All values of each draw, for each task: [draws, values]; arms of equal seeds and controllers draw the same."""
    some, others = np.random.default_rng([rng_seed, 0]), np.random.default_rng([rng_seed, 1])
    most = max(max(scores.shape[:-1]) for scores in strata)
    chosen = some.random((most, 2, draws))  # of our controllers, and of theirs where they are others
    found = []
    for scores in strata:
        every = scores if scores.ndim == 3 else scores[:, None]
        ours, theirs = ((chosen[:n, side].T * n).astype(int) for side, n in enumerate(every.shape[:2]))
        columns = others.integers(every.shape[2], size=(draws, every.shape[2]))
        drawn = every[ours[:, :, None, None], theirs[:, None, :, None], columns[:, None, None, :]]
        found.append(drawn.reshape(draws, -1))
    return found


def _above(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """[draws, n] and [draws, m] -> [draws]"""
    gaps = (ours[:, :, None] - theirs[:, None, :]).reshape(len(ours), -1)
    return _share((gaps > 0) + 0.5 * (gaps == 0), gaps)


def _share(wins: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of the values that are there, over the last axis."""
    return mean(np.where(np.isnan(values), np.nan, wins))


def bounds(strata: Strata) -> tuple[float, float]:
    """The quantiles between which an interval lies, further out the fewer units there are.

    A percentile interval of few units is too narrow, as a normal interval is against Student's, and by the bias of
    their deviation; Hesterberg (2015) moves its quantiles out by these two factors. The units are controllers where
    there are several, else seeds.
    """
    controllers = min(min(scores.shape[:-1]) for scores in strata)
    units = controllers if controllers > 1 else sum(scores.shape[-1] for scores in strata)
    if units < 2:
        return 0.0, 1.0
    low = NORMAL.cdf(-student(units - 1) * (units / (units - 1)) ** 0.5)
    return low, 1 - low


def student(freedom: int) -> float:
    """The upper quantile of Student's distribution for an interval of 95 %, by its expansion (Abramowitz, 26.7.5)."""
    z, n = NORMAL.inv_cdf((1 + LEVEL) / 2), freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(n) ** power for power, term in enumerate(terms, 1))


def _estimate(value: np.ndarray, found: np.ndarray, between: tuple[float, float]) -> Estimate:
    low, high = np.nanquantile(found, between)
    return Estimate(float(value), float(low), float(high))
