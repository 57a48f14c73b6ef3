import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from esper.evaluation import statistics
from esper.evaluation.statistics import (
    MIN_UNITS,
    SIGNIFICANCE,
    Estimate,
    estimate,
    holm,
    interquartile_mean,
    mean,
    paired_difference,
    performance_profile,
    probability_of_improvement,
    student_p_value,
    student_quantile,
    worst_tenth,
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


def test_the_worst_tenth_has_one_episode_at_least() -> None:
    assert worst_tenth(np.arange(30.0)) == 1  # of 0, 1, 2
    assert worst_tenth(np.array([5.0, 3.0, np.nan, 4.0])) == 3


def test_several_controllers_are_the_unit_of_the_interval() -> None:
    """Two controllers with constant scores 0 and 2: the t-interval of two values."""
    scores = np.array([[0.0] * 20, [2.0] * 20])
    found = estimate([scores], mean)
    assert found.value == 1
    assert found.high - found.value == pytest.approx(12.706, abs=1e-3)  # t of 1 degree of freedom x 1
    pooled = estimate([scores.reshape(1, -1)], mean)
    assert pooled.high - pooled.low < 1  # forty independent episodes would have a far narrower interval


def test_the_bootstrap_of_episode_seeds_agrees_with_the_formula_for_a_mean() -> None:
    scores = np.array([[1.0, 2.0, 6.0, 7.0], [3.0, 5.0, 4.0, 9.0]])
    exact, resampled = estimate([scores], mean), estimate([scores], lambda values: mean(values), resamples=40_000)
    assert (resampled.low, resampled.high) == pytest.approx((exact.low, exact.high), rel=0.02)


def test_a_controller_has_one_mean_over_all_tasks() -> None:
    """A controller loses on one task what it gains on the other, so the mean over tasks is constant."""
    gains = np.array([[1.0] * 6, [-1.0] * 6])
    found = estimate([gains, -gains], mean)
    assert (found.low, found.high) == (0, 0)


def test_six_tasks_are_units_and_fewer_are_not() -> None:
    constant = [np.full((1, 5), 10.0 * number) for number in range(MIN_UNITS)]
    few = estimate(constant[:-1], mean)
    assert (few.low, few.value, few.high) == (20, 20, 20)  # for these tasks, which episode seeds do not change
    found = estimate(constant, mean)
    assert found.high - found.value == pytest.approx(2.571 * np.std(np.arange(6) * 10, ddof=1) / 6**0.5, rel=1e-3)


def test_differences_are_taken_on_the_same_episode_seed() -> None:
    varied = np.array([[10.0, 20, 30, 40, 50, 60, 70, 80]])
    found = paired_difference([varied + 1], [varied])
    assert (found.low, found.value, found.high) == pytest.approx((1, 1, 1))
    assert found.excludes_zero


def test_missing_episodes_are_not_resampled() -> None:
    scores = np.array([[1.0, 2.0, 3.0, np.nan, np.nan], [np.nan, np.nan, np.nan, 5.0, 7.0]])
    assert interquartile_mean(scores).tolist() == [2, 6]
    found = estimate([scores])
    assert found.value == pytest.approx(4)  # the mean of two controllers
    assert found.low < 4 < found.high
    shares, _, _ = performance_profile([scores], np.array([2.5]))
    assert shares == pytest.approx([2 / 3])
    assert probability_of_improvement([scores], [np.zeros((1, 5))]).value == 1


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (19, 2.093), (99, 1.984), (10**6, 1.960)]
)  # printed tables
def test_students_quantile_matches_printed_tables(freedom: int, expected: float) -> None:
    assert student_quantile(freedom) == pytest.approx(expected, abs=5e-4)
    assert student_p_value(-student_quantile(freedom), freedom) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("t", "freedom", "expected"),
    [(1, 1, 0.5), (2**0.5, 2, 0.2928932), (3, 5, 0.0300992), (10, 30, 4.5752514e-11), (0, 7, 1)],
)
def test_students_p_value_matches_known_values(t: float, freedom: int, expected: float) -> None:
    """Of 1 and 2 degrees of freedom there are formulas: 1 - 2 atan(t) / pi and 1 - t / sqrt(2 + t^2)."""
    assert student_p_value(t, freedom) == pytest.approx(expected, rel=1e-5)


@given(arrays(float, (3, 7, 4), elements=st.floats(-50, 50)), st.booleans())
def test_the_p_value_is_below_5_percent_where_the_interval_excludes_zero(scores: np.ndarray, one_task: bool) -> None:
    found = estimate([scores[:, 0]] if one_task else list(scores.swapaxes(0, 1)), mean)
    if abs(abs(found.value) - (found.high - found.value)) > 1e-6:
        assert (found.p_value < SIGNIFICANCE) == found.excludes_zero


def test_the_p_value_of_one_controller_is_that_of_a_t_test() -> None:
    """Mean 2.5, standard error 0.6455, 3 degrees of freedom: t = 3.873."""
    found = estimate([np.array([[1.0, 2.0, 3.0, 4.0]])], mean)
    assert found.p_value == pytest.approx(0.0305, abs=1e-4)
    assert estimate([np.array([[3.0]])]).p_value == 1  # a single episode has no variance that is known
    assert estimate([np.full((1, 6), 3.0)]).p_value < 1e-9


def test_holms_adjustment_matches_a_known_example() -> None:
    """The smallest of four is multiplied by 4, the next by 3, and so on, and none falls below an earlier one."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []


def simulate(rng: np.random.Generator, controllers: int, effect: float) -> list[np.ndarray]:
    """Differences on 20 tasks of 8 episode seeds: effects of controllers, of tasks, of both together, and noise."""
    tasks, episode_seeds = 20, 8
    scores = rng.normal(effect, 1.0, (1, controllers, 1)) + rng.normal(0, 0.5, (tasks, 1, 1))
    scores = scores + rng.normal(0, 0.5, (tasks, controllers, 1))
    return list(scores + rng.normal(0, 1.0, (tasks, controllers, episode_seeds)))


@pytest.mark.parametrize(("controllers", "effect", "power"), [(3, 3.0, 0.6), (6, 1.5, 0.6), (10, 1.5, 0.9)])
def test_false_claims_are_rare_and_true_differences_are_found(controllers: int, effect: float, power: float) -> None:
    """Resampling three controllers makes 20 % false claims here: all three agree at random in a quarter of cases."""
    rng = np.random.default_rng(0)
    false_claims = np.mean([estimate(simulate(rng, controllers, 0.0)).excludes_zero for _ in range(1000)])
    assert 0.01 <= false_claims <= 0.06
    assert np.mean([estimate(simulate(rng, controllers, effect)).excludes_zero for _ in range(200)]) >= power


@pytest.mark.parametrize("controllers", [3, 6, 10])
def test_false_claims_are_rare_on_one_task(controllers: int) -> None:
    """Controllers differ, and all are compared with the same episodes of one arm, whose noise they share."""
    rng = np.random.default_rng(0)
    draws = (
        rng.normal(0, 1, (controllers, 1)) + rng.normal(0, 1, (controllers, 10)) - rng.normal(0, 1, (1, 10))
        for _ in range(400)
    )
    assert np.mean([estimate([gaps], resamples=200).excludes_zero for gaps in draws]) <= 0.06


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
    assert found.value == pytest.approx(3.2)
    assert not found.excludes_zero


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
def test_an_interval_contains_its_value_and_is_reproducible(scores: np.ndarray, rng_seed: int) -> None:
    found = estimate([scores], resamples=50, rng_seed=rng_seed)
    tiny = 1e-9
    assert scores.min() - tiny <= found.value <= scores.max() + tiny
    assert found.low <= found.value <= found.high
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
        return [estimate(pairs, resamples=97)]

    whole = results()
    for values in (1, 1000):
        monkeypatch.setattr(statistics, "CHUNK_VALUES", values)
        assert results() == whole


def test_the_probability_of_improvement_counts_every_pair() -> None:
    """All pairs of episodes of each pair of controllers, with half a win for a tie and none for a missing episode."""
    rng = np.random.default_rng(0)
    ours, theirs = np.broadcast_arrays(with_gaps(rng, 3, 1, 20), with_gaps(rng, 1, 2, 20))
    gaps = ours[..., :, None] - theirs[..., None, :]
    shares = np.nanmean(np.where(np.isnan(gaps), np.nan, (gaps > 0) + 0.5 * (gaps == 0)), axis=(-1, -2))
    found = probability_of_improvement([ours], [theirs], resamples=97)
    assert found.value == pytest.approx(shares.mean())
    assert 0 <= found.low < found.value < found.high <= 1
    one, other = [ours[:1, 0, :]], [theirs[0, :1, :]]
    columns = statistics._draw_columns(20, 97, [0, 0])
    picked = gaps[0, 0][columns[:, :, None], columns[:, None, :]]
    resampled = np.nanmean(np.where(np.isnan(picked), np.nan, (picked > 0) + 0.5 * (picked == 0)), axis=(-1, -2))
    reach = student_quantile(19) * resampled.std() * (20 / 19) ** 0.5
    found = probability_of_improvement(one, other, resamples=97)
    assert found.high - found.value == pytest.approx(reach)


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
