import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from esper.evaluation import statistics
from esper.evaluation.statistics import (
    Estimate,
    estimate,
    interquartile_mean,
    interval_quantiles,
    mean,
    paired_difference,
    performance_profile,
    probability_of_improvement,
    student_quantile,
)

SCORES = arrays(float, st.tuples(st.integers(1, 3), st.integers(1, 8)), elements=st.floats(-50, 50))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2, 3, 4], 2.5),
        ([1, 3, 4, 5, 6, 6, 7, 7, 8, 8, 9, 38], 6.5),  # the example of Wikipedia's article, 12 values
        ([0, 10, 11, 12, 100], 11),  # one is dropped at each end
        ([5], 5),
        ([1, 2, 3], 2),
    ],
)
def test_the_interquartile_mean_is_the_mean_of_the_middle_half(values: list[float], expected: float) -> None:
    assert interquartile_mean(np.array(values, dtype=float)) == pytest.approx(expected)


def test_the_interquartile_mean_ignores_one_outlier_at_each_end() -> None:
    regular = np.array([1.0, 2, 3, 4, 5, 6, 7, 8])
    outliers = np.array([-1e9, 2, 3, 4, 5, 6, 7, 1e9])
    assert interquartile_mean(regular) == interquartile_mean(outliers) == 4.5


def test_an_interval_has_the_quantiles_of_all_resamples() -> None:
    """Three episode seeds have 27 resamples, so the exact bootstrap can be enumerated."""
    scores = np.array([[1.0, 2.0, 6.0]])
    means = [np.mean(chosen) for chosen in product(scores[0], repeat=3)]
    found = estimate([scores], lambda values: values.mean(-1), resamples=40_000)
    assert found.value == pytest.approx(3)
    exact = np.quantile(means, interval_quantiles([scores]), method="inverted_cdf")
    assert [found.low, found.high] == pytest.approx(exact.tolist(), abs=1e-9)


def test_several_controllers_are_the_unit_of_the_interval() -> None:
    """Two controllers with constant scores: 4 resamples of rows, with means 0, 1, 1, 2 in equal shares."""
    scores = np.array([[0.0] * 20, [2.0] * 20])
    found = estimate([scores], lambda values: values.mean(-1))
    assert (found.value, found.low, found.high) == (1, 0, 2)
    pooled = estimate([scores.reshape(1, -1)], lambda values: values.mean(-1))
    assert pooled.high - pooled.low < 1  # forty independent episodes would have a far narrower interval


def test_controllers_are_resampled_jointly_for_all_tasks_and_episode_seeds_within_each() -> None:
    """A controller loses on one task what it gains on the other, so the mean over tasks is constant."""
    gains = np.array([[1.0] * 6, [-1.0] * 6])
    found = estimate([gains, -gains], lambda values: values.mean(-1))
    assert (found.low, found.high) == (0, 0)
    separate = estimate([np.full((1, 5), 10.0), np.full((1, 5), 20.0)], lambda values: values.mean(-1))
    assert (separate.low, separate.value, separate.high) == (15, 15, 15)  # equal numbers of each task in every resample


def test_differences_are_taken_on_the_same_episode_seed() -> None:
    varied = np.array([[10.0, 20, 30, 40, 50, 60, 70, 80]])
    found = paired_difference([varied + 1], [varied])
    assert (found.low, found.value, found.high) == pytest.approx((1, 1, 1))
    assert found.excludes_zero


def test_missing_episodes_are_not_resampled() -> None:
    scores = np.array([[1.0, 2.0, 3.0, np.nan, np.nan], [np.nan, np.nan, np.nan, 5.0, 7.0]])
    assert interquartile_mean(scores).tolist() == [2, 6]
    found = estimate([scores], lambda values: mean(values))
    assert found.value == pytest.approx(3.6)
    assert 1 <= found.low < found.high <= 7
    shares, _, _ = performance_profile([scores], np.array([2.5]))
    assert shares.tolist() == [0.6]
    assert probability_of_improvement([scores], [np.zeros((1, 5))]).value == 1


@pytest.mark.parametrize(
    ("freedom", "expected"), [(2, 4.303), (4, 2.776), (9, 2.262), (19, 2.093), (99, 1.984)]
)  # printed tables
def test_students_quantile_matches_printed_tables(freedom: int, expected: float) -> None:
    assert student_quantile(freedom) == pytest.approx(expected, rel=0.03 if freedom < 4 else 0.001)


def test_intervals_of_few_units_are_wider() -> None:
    """For ten units the factor is 2.262 x sqrt(10 / 9) = 2.385, with a tail of 0.85 %."""
    assert interval_quantiles([np.zeros((1, 10))]) == pytest.approx((0.0085, 0.9915), abs=1e-4)
    assert interval_quantiles([np.zeros((1, 10_000))]) == pytest.approx((0.025, 0.975), abs=1e-4)
    assert interval_quantiles([np.zeros((3, 10_000))]) == pytest.approx((0, 1), abs=1e-6)  # controllers are the unit
    assert interval_quantiles([np.zeros((1, 5))] * 2) == interval_quantiles([np.zeros((1, 10))])


@pytest.mark.parametrize(("episode_seeds", "limit"), [(6, 0.07), (10, 0.06), (20, 0.06)])
def test_an_interval_of_pure_noise_rarely_excludes_zero(episode_seeds: int, limit: float) -> None:
    noise = np.random.default_rng(1).normal(size=(600, 1, episode_seeds))
    wrong = np.mean([estimate([scores], resamples=400).excludes_zero for scores in noise])
    assert wrong < limit


def test_controllers_of_the_other_arm_are_resampled_too() -> None:
    """Two of their five controllers have collapsed: whether ours is better depends on which are resampled."""
    ours, theirs = np.full((5, 8), 45.0), np.full((5, 8), 45.0)
    theirs[3:] = 37.0
    found = paired_difference(*([arm] for arm in np.broadcast_arrays(ours[:, None], theirs[None])))
    assert found.value == pytest.approx(2.4, abs=1)
    assert not found.excludes_zero
    assert interval_quantiles([np.zeros((5, 3, 8))]) == interval_quantiles(
        [np.zeros((3, 8))]
    )  # the smaller number is that of units


def test_an_estimate_of_several_tasks_is_the_mean_over_them() -> None:
    """The gains of the first task are a third of all values, most of which a pooled interquartile mean would drop."""
    gains, nothing = np.array([[9.0] * 5 + [0.0] * 3]), np.zeros((1, 8))
    assert estimate([gains, nothing]).value == pytest.approx(6.75 / 2)
    assert interquartile_mean(np.concatenate([gains, nothing], 1)) == pytest.approx(9 / 8)


def test_differences_of_the_same_controllers_are_paired_by_controller() -> None:
    ours = np.array([[1.0, 2.0], [11.0, 12.0]])
    found = paired_difference([ours + 3], [ours])
    assert (found.low, found.high) == pytest.approx((3, 3))
    against_one = paired_difference([ours], [np.array([[0.0, 0.0]])])
    assert against_one.value == pytest.approx(6.5)


def test_the_probability_of_improvement_is_the_mann_whitney_statistic() -> None:
    """U of {3, 4, 2} against {1, 2, 5}: 2 + 2 + 1.5 of 9 pairs, as the tie counts half."""
    found = probability_of_improvement([np.array([[3.0, 4.0, 2.0]])], [np.array([[1.0, 2.0, 5.0]])])
    assert found.value == pytest.approx(5.5 / 9)
    always = probability_of_improvement([np.array([[3.0, 4.0]])], [np.array([[1.0, 2.0]])])
    assert always == Estimate(1, 1, 1)
    halves = probability_of_improvement([np.ones((1, 2)), np.zeros((1, 2))], [np.zeros((1, 2)), np.ones((1, 2))])
    assert halves.value == 0.5  # all of one task, none of the other


@given(SCORES)
def test_an_arm_does_not_differ_from_itself(scores: np.ndarray) -> None:
    assert paired_difference([scores], [scores], resamples=50) == Estimate(0, 0, 0)
    assert probability_of_improvement([scores], [scores], resamples=50).value == pytest.approx(0.5)


@given(SCORES, st.integers(0, 5))
def test_an_interval_stays_between_the_extremes_and_is_reproducible(scores: np.ndarray, rng_seed: int) -> None:
    found = estimate([scores], resamples=50, rng_seed=rng_seed)
    tiny = 1e-9
    assert scores.min() - tiny <= found.low <= found.high <= scores.max() + tiny
    assert found == estimate([scores], resamples=50, rng_seed=rng_seed)


def test_a_performance_profile_is_the_share_above_each_threshold() -> None:
    shares, lows, highs = performance_profile([np.array([[1.0, 2.0, 3.0, 4.0]])], np.array([0.0, 2.0, 3.5, 9.0]))
    assert shares.tolist() == [1, 0.5, 0.25, 0]
    assert (lows <= shares).all()
    assert (shares <= highs).all()
    assert (lows[0], highs[0], highs[-1]) == (1, 1, 0)


def test_intervals_shrink_with_more_episode_seeds() -> None:
    few = estimate([np.array([[1.0, 2.0, 3.0, 4.0]])])
    many = estimate([np.array([[1.0, 2.0, 3.0, 4.0] * 25])])
    assert few.low < many.low < many.high < few.high
    assert estimate([np.array([[2.0]])]) == Estimate(2, 2, 2)


def with_gaps(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Scores with ties and missing episodes."""
    scores = rng.normal(size=shape).round(1)
    return np.where(rng.random(shape) < 0.1, np.nan, scores)


def test_intervals_do_not_depend_on_how_many_resamples_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ours, theirs = ([with_gaps(rng, rows, n) for n in (9, 20)] for rows in (3, 2))
    pairs = [mine[:, None] - other[None] for mine, other in zip(ours, theirs, strict=True)]

    def results() -> list[object]:
        profile = performance_profile(ours, np.linspace(-1, 1, 5), resamples=97)
        chance = probability_of_improvement(ours, theirs, resamples=97)
        return [estimate(pairs, resamples=97), chance, *(bounds.tolist() for bounds in profile)]

    whole = results()
    for values in (1, 1000):
        monkeypatch.setattr(statistics, "CHUNK_VALUES", values)
        assert results() == whole


def test_the_probability_of_improvement_counts_every_pair() -> None:
    """All pairs of each resample, with half a win for a tie and none for a missing episode."""
    rng = np.random.default_rng(0)
    ours, theirs = [with_gaps(rng, 3, 20)], [with_gaps(rng, 2, 20)]
    (mine,), (other,) = (next(statistics._resample(side, 97, 0, chunk=97)) for side in (ours, theirs))
    gaps = (mine[:, :, None] - other[:, None, :]).reshape(97, -1)
    shares = np.nanmean(np.where(np.isnan(gaps), np.nan, (gaps > 0) + 0.5 * (gaps == 0)), axis=-1)
    found = probability_of_improvement(ours, theirs, resamples=97)
    assert [found.low, found.high] == np.quantile(shares, interval_quantiles(ours)).tolist()


def test_memory_of_a_comparison_does_not_grow_with_pairs_or_resamples() -> None:
    rng = np.random.default_rng(0)
    ours, theirs = [rng.normal(size=(1, 500))], [rng.normal(size=(1, 500))]  # 4 GB with all pairs of 2,000 resamples
    tracemalloc.start()
    try:
        probability_of_improvement(ours, theirs)
        estimate([rng.normal(size=(8, 8, 100))])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100e6
