"""Estimates with bootstrap intervals.

Scores are passed as strata: one array per task, [controllers, episode seeds]. A row is a trained controller; arms
without one have a single row. The columns are episode seeds, which all arms of a task share. The difference of two arms
that have different trained controllers is [our controllers, their controllers, episode seeds]. NaN marks a missing
episode; it is not part of any resample.

An interval is a percentile bootstrap, widened for few units. Controllers are resampled as whole rows, the same rows in
all tasks, because they are what was trained repeatedly. Within each task, episode seeds are resampled, the same seeds
for all arms that are compared. With one controller, the interval is valid for that controller only. An estimate over
several tasks is the mean over tasks: a pooled interquartile mean would trim values that are large in one task only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Strata = Sequence[np.ndarray]
Statistic = Callable[[np.ndarray], np.ndarray]  # [..., values] -> [...]
NORMAL = NormalDist()
LEVEL = 0.95
RESAMPLES = 2_000
MIN_UNITS = 6  # with fewer, all agree at random in more than one case of twenty, and intervals are unreliable
TRIM = 0.25  # share of the values that the interquartile mean drops at each end
CHUNK_VALUES = 1 << 20  # values of resamples in memory at once: 8 MB, and a few copies


@dataclass(frozen=True)
class Estimate:
    """A value with its interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


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


def estimate(
    strata: Strata, statistic: Statistic = interquartile_mean, *, resamples: int = RESAMPLES, rng_seed: int = 0
) -> Estimate:
    """The mean over tasks of a statistic of each task's values, with its interval."""
    observed = [statistic(scores.ravel()) for scores in strata]
    chunks = _resample(strata, resamples, rng_seed, _chunk_size(strata))
    resampled = np.concatenate([[statistic(values) for values in chunk] for chunk in chunks], axis=-1)
    return _with_interval(np.mean(observed, axis=0), np.mean(resampled, axis=0), interval_quantiles(strata))


def paired_difference(ours: Strata, theirs: Strata, *, resamples: int = RESAMPLES, rng_seed: int = 0) -> Estimate:
    """Interquartile mean of our score minus theirs on the same episode seed; a single row is paired with every row."""
    gaps = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    return estimate(gaps, resamples=resamples, rng_seed=rng_seed)


def probability_of_improvement(
    ours: Strata, theirs: Strata, *, resamples: int = RESAMPLES, rng_seed: int = 0
) -> Estimate:
    """Probability that one of our episodes scores above one of theirs on any episode seed; the mean over tasks.

    It is the Mann-Whitney statistic divided by the number of pairs; ties count half.
    """
    chunk = _chunk_size([*ours, *theirs])
    # one rng_seed: both sides resample the same rows and columns
    sides = (_resample(side, resamples, rng_seed, chunk) for side in (ours, theirs))
    resampled = np.concatenate(
        [[_share_above(*pair) for pair in zip(*chunks, strict=True)] for chunks in zip(*sides, strict=True)], axis=-1
    )
    observed = [
        _share_above(mine.reshape(1, -1), other.reshape(1, -1))[0] for mine, other in zip(ours, theirs, strict=True)
    ]
    return _with_interval(np.mean(observed), np.mean(resampled, axis=0), interval_quantiles(ours))


def performance_profile(
    strata: Strata, thresholds: np.ndarray, *, resamples: int = RESAMPLES, rng_seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of episodes that score above each threshold, and the bounds of its interval; each [thresholds]."""
    observed = np.concatenate([scores.ravel() for scores in strata])
    shares = np.array([_share(observed > threshold, observed) for threshold in thresholds])
    chunks = (np.concatenate(c, axis=-1) for c in _resample(strata, resamples, rng_seed, _chunk_size(strata)))
    resampled_shares = np.concatenate(
        [[_share(chunk > threshold, chunk) for threshold in thresholds] for chunk in chunks], axis=-1
    )
    low, high = np.nanquantile(resampled_shares, interval_quantiles(strata), axis=-1)
    return shares, low, high


def _chunk_size(strata: Strata) -> int:
    """Number of resamples that are processed at once, so that memory does not grow with their number."""
    return max(1, CHUNK_VALUES // sum(scores.size for scores in strata))


def _resample(strata: Strata, resamples: int, rng_seed: int, chunk: int) -> Iterator[list[np.ndarray]]:
    """All values of `chunk` resamples at a time, for each task: [chunk, values].

    Arms with equal numbers of controllers and episode seeds get the same resamples.
    """
    row_rng, column_rng = np.random.default_rng([rng_seed, 0]), np.random.default_rng([rng_seed, 1])
    max_rows = max(max(scores.shape[:-1]) for scores in strata)
    fractions = row_rng.random((max_rows, 2, resamples))  # of our controllers, and of theirs if they are different
    columns = [column_rng.integers(scores.shape[-1], size=(resamples, scores.shape[-1])) for scores in strata]
    for start in range(0, resamples, chunk):
        drawn = slice(start, start + chunk)
        result = []
        for scores, column in zip(strata, columns, strict=True):
            pairs = scores if scores.ndim == 3 else scores[:, None]
            ours, theirs = ((fractions[:n, side, drawn].T * n).astype(int) for side, n in enumerate(pairs.shape[:2]))
            values = pairs[ours[:, :, None, None], theirs[:, None, :, None], column[drawn, None, None, :]]
            result.append(values.reshape(len(values), -1))
        yield result


def _share_above(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """[resamples, n] and [resamples, m] -> [resamples]

    Counted by rank, since all pairs of values would take n x m in memory. Halves are exact in floating point.
    """
    ordered = np.sort(theirs, axis=-1)  # NaN last
    counts = np.stack([(~np.isnan(values)).sum(-1) for values in (ours, theirs)])
    wins = np.empty(len(ours))
    for row, (mine, other, count) in enumerate(zip(ours, ordered, counts[1], strict=True)):
        present = mine[~np.isnan(mine)]
        below, up_to = (np.searchsorted(other[:count], present, side) for side in ("left", "right"))
        wins[row] = 0.5 * (below.sum() + up_to.sum())
    with np.errstate(invalid="ignore"):
        result: np.ndarray = wins / counts.prod(0)
    return result


def _share(wins: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mean of `wins` over the last axis, where `values` are not NaN."""
    return mean(np.where(np.isnan(values), np.nan, wins))


def interval_quantiles(strata: Strata) -> tuple[float, float]:
    """The quantiles of the resamples that bound an interval; the fewer units, the further out.

    A percentile interval of few units is too narrow for two reasons: it uses the normal distribution instead of
    Student's, and the deviation of few units is biased. Hesterberg (2015) corrects the quantiles by these two factors.
    The units are controllers if there are several, otherwise episode seeds.
    """
    controllers = min(min(scores.shape[:-1]) for scores in strata)
    units = controllers if controllers > 1 else sum(scores.shape[-1] for scores in strata)
    if units < 2:
        return 0.0, 1.0
    low = NORMAL.cdf(-student_quantile(units - 1) * (units / (units - 1)) ** 0.5)
    return low, 1 - low


def student_quantile(freedom: int) -> float:
    """The upper quantile of Student's t distribution for a 95 % interval, by expansion (Abramowitz, 26.7.5)."""
    z, n = NORMAL.inv_cdf((1 + LEVEL) / 2), freedom
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(n) ** power for power, term in enumerate(terms, 1))


def _with_interval(value: np.ndarray, resampled: np.ndarray, quantiles: tuple[float, float]) -> Estimate:
    low, high = np.nanquantile(resampled, quantiles)
    return Estimate(float(value), float(low), float(high))
