"""What scores say, and how sure that is.

Scores come as strata, one for each task, each an array [controllers, seeds]: one row for each trained controller, or
one in all for rules that are not trained; the columns are episode seeds, which all arms of a task share. An interval
is a percentile bootstrap in which controllers are drawn anew as wholes, the same for all tasks, since they are what
was trained several times, and within each task the seeds, the same for all arms that are compared. With one controller
it speaks of that controller alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Strata = Sequence[np.ndarray]
Statistic = Callable[[np.ndarray], np.ndarray]  # [..., values] -> [...]
BOUNDS = (0.025, 0.975)  # of an interval of 95 %
DRAWS = 2_000
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
    ordered = np.sort(values, axis=-1)
    cut = int(TRIM * ordered.shape[-1])
    kept: np.ndarray = ordered[..., cut : ordered.shape[-1] - cut].mean(-1)
    return kept


def estimate(
    strata: Strata, statistic: Statistic = interquartile_mean, *, draws: int = DRAWS, seed: int = 0
) -> Estimate:
    """A statistic of all values together, with its interval."""
    seen = statistic(np.concatenate([scores.ravel() for scores in strata]))
    return _estimate(seen, statistic(_drawn(strata, draws, seed)))


def difference(ours: Strata, theirs: Strata, *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Interquartile mean of our score less theirs on the same seed.

    Where both have a row for each of the same trained controllers, these are paired as well; where one has a single
    row, that is compared with every row of the other.
    """
    paired = [mine - (other if len(other) in (1, len(mine)) or len(mine) == 1 else other.mean(0, keepdims=True))
              for mine, other in zip(ours, theirs, strict=True)]  # fmt: skip
    return estimate(paired, draws=draws, seed=seed)


def improvement(ours: Strata, theirs: Strata, *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Probability that an episode of ours scores above one of theirs on any seed, ties half; the mean over tasks.

    It is the Mann-Whitney statistic over the number of pairs.
    """
    rng = np.random.default_rng(seed)
    most = max(len(scores) for scores in (*ours, *theirs))
    chosen = rng.random((draws, most))
    found, seen = [], []
    for mine, other in zip(ours, theirs, strict=True):
        columns = _columns(rng, draws, mine)
        pair = [_resample(scores, _rows(chosen, len(scores)), columns).reshape(draws, -1) for scores in (mine, other)]
        found.append(_above(pair[0], pair[1]))
        seen.append(_above(mine.reshape(1, -1), other.reshape(1, -1))[0])
    return _estimate(np.mean(seen), np.mean(found, axis=0))


def profile(
    strata: Strata, thresholds: np.ndarray, *, draws: int = DRAWS, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Share of episodes that score above each threshold, with the bounds of its interval; each [thresholds]."""
    seen, drawn = np.concatenate([scores.ravel() for scores in strata]), _drawn(strata, draws, seed)
    shares = np.array([(seen > threshold).mean() for threshold in thresholds])
    found = np.array([(drawn > threshold).mean(-1) for threshold in thresholds])  # [thresholds, draws]
    low, high = np.quantile(found, BOUNDS, axis=-1)
    return shares, low, high


def _drawn(strata: Strata, draws: int, seed: int) -> np.ndarray:
    """All values of each draw: [draws, values]"""
    rng = np.random.default_rng(seed)
    chosen = rng.random((draws, max(len(scores) for scores in strata)))
    parts = [_resample(scores, _rows(chosen, len(scores)), _columns(rng, draws, scores)) for scores in strata]
    return np.concatenate([part.reshape(draws, -1) for part in parts], axis=-1)


def _above(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """[draws, n] and [draws, m] -> [draws]"""
    gaps = ours[:, :, None] - theirs[:, None, :]
    shares: np.ndarray = ((gaps > 0) + 0.5 * (gaps == 0)).mean((1, 2))
    return shares


def _rows(chosen: np.ndarray, controllers: int) -> np.ndarray:
    """Which controllers each draw has; arms with as many controllers draw the same."""
    rows: np.ndarray = (chosen[:, :controllers] * controllers).astype(int)
    return rows


def _columns(rng: np.random.Generator, draws: int, scores: np.ndarray) -> np.ndarray:
    return rng.integers(scores.shape[1], size=(draws, scores.shape[1]))


def _resample(scores: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """[draws, controllers, seeds]"""
    drawn: np.ndarray = scores[rows[:, :, None], columns[:, None, :]]
    return drawn


def _estimate(value: np.ndarray, found: np.ndarray) -> Estimate:
    low, high = np.quantile(found, BOUNDS)
    return Estimate(float(value), float(low), float(high))
