import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper.environment import EpisodeStart
from esper.environment.clock import BatchClock, BudgetClock, Spending, StepSize, make_clock

SETTINGS = {"budget_share": 1.0, "validation_samples": 200, "validation_every": 1, "measure_share": 0.1}


def clock(**changes: float | None) -> BudgetClock:
    return BudgetClock(**{"budget": 1e-9, "budget_batches": None, **SETTINGS, **changes})  # type: ignore[arg-type]


def run_episode(
    tested: BudgetClock, steps: int, costs: list[tuple[float, float]], start: EpisodeStart, budget: float = 1.0
) -> tuple[list[StepSize], list[float], float]:
    """Sizes of all steps, FLOPs spent after each, and FLOPs of measurements; `costs` are (batch, measurement)."""
    spent = measured = 0.0
    sizes, totals = [], []
    for step in range(steps):
        batch, measurement = costs[step % len(costs)]
        now = Spending(budget, spent, measured, batch, measurement)
        size = tested.step_size(step, steps, start, lambda now=now: now)  # type: ignore[misc]
        spent += size.batches * batch
        if size.measure and size.charge:
            spent, measured = spent + measurement, measured + measurement
        sizes.append(size)
        totals.append(spent)
    return sizes, totals, measured


costs_of_steps = st.lists(st.tuples(st.floats(1e-3, 0.5), st.floats(1e-4, 0.3)), min_size=1, max_size=8)


@given(st.integers(1, 30), costs_of_steps, st.integers(1, 4), st.floats(0, 0.5), st.booleans())
def test_an_episode_ends_at_most_one_batch_above_its_budget_and_no_slice_is_overspent(
    steps: int, costs: list[tuple[float, float]], every: int, share: float, measured: bool
) -> None:
    tested = clock(validation_every=every, measure_share=share)
    sizes, totals, for_measurements = run_episode(tested, steps, costs, EpisodeStart(measured=measured))
    for step, total in enumerate(totals[:-1]):
        assert total <= (step + 1) / steps + 1e-6
    last_batch = costs[(steps - 1) % len(costs)][0]
    assert 1 - 1e-6 <= totals[-1] <= 1 + last_batch + 1e-6
    assert for_measurements <= share + 1e-9
    assert (sizes[-1].measure, sizes[-1].samples, sizes[-1].charge) == (True, None, False)
    assert all(size.batches >= 1 for size in sizes[:-1] if size.measure)
    if not measured:
        assert not any(size.measure for size in sizes[:-1])
    edges = [edge for size in sizes for edge in size.progress]
    assert edges == sorted(edges)
    assert 0 <= edges[0] <= edges[-1] <= 1


def test_what_a_slice_leaves_over_is_spent_by_a_later_one() -> None:
    sizes, totals, _ = run_episode(clock(), 4, [(0.15, 0.01)], EpisodeStart(measured=False))
    assert [size.batches for size in sizes] == [1, 2, 2, 2]  # 0.25, 0.5, 0.75 and 1 pay for 1, 3, 5 and 6.67 batches
    assert totals[-1] == pytest.approx(1.05)


def test_a_slice_that_does_not_pay_for_a_batch_trains_nothing_and_measures_nothing() -> None:
    sizes, _, _ = run_episode(clock(measure_share=0.5), 4, [(0.4, 0.001)], EpisodeStart())
    assert [(size.batches, size.measure) for size in sizes] == [(0, False), (1, True), (0, False), (2, True)]


def test_a_cheaper_network_trains_on_more_batches_in_the_same_slice() -> None:
    cheap, costly = (run_episode(clock(), 5, [(c, 1e-3)], EpisodeStart(measured=False))[0] for c in (0.01, 0.04))
    assert sum(size.batches for size in cheap) == 4 * sum(size.batches for size in costly) == 100


def test_the_learning_rate_follows_the_spent_share_of_the_budget() -> None:
    sizes, totals, _ = run_episode(clock(), 10, [(0.02, 0.005)], EpisodeStart())
    assert sizes[3].progress == pytest.approx((totals[2], totals[2] + 0.02 * sizes[3].batches))
    assert sizes[-1].progress[1] == 1


def test_a_budget_in_batches_costs_these_batches_of_the_bare_host() -> None:
    tested = clock(budget=None, budget_batches=300.0)
    assert tested.budget(2e6, 20, EpisodeStart()) == 300 * 2e6
    assert tested.budget(2e6, 20, EpisodeStart(budget=0.25)) == 75 * 2e6
    assert clock(budget=150.0).budget(2e6, 20, EpisodeStart()) == 150e9


def test_the_batch_clock_ignores_costs() -> None:
    def read() -> Spending:
        raise AssertionError

    size = BatchClock(16).step_size(3, 20, EpisodeStart(), read)
    assert size == StepSize(16, (3 / 20, 4 / 20), True, None, True)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"budget": None}, "environment.budget=None, environment.budget_batches=None: must set exactly one."),
        ({"budget_batches": 3.0}, "must set exactly one."),
        ({"budget": 0.0}, "environment.budget=0.0: must be above 0."),
        ({"budget": None, "budget_batches": math.inf}, "environment.budget_batches=inf: must be above 0."),
        ({"validation_samples": 0}, "environment.validation_samples=0: must be at least 1."),
        ({"measure_share": 1.0}, "environment.measure_share=1.0: must be at least 0 and below 1."),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused_in_one_sentence(changes: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match="environment") as error:
        clock(**changes)
    assert str(error.value).endswith(sentence)


def test_a_budget_beside_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"environment.budget=150.0: must be null with environment.batches=16; use"):
        make_clock(batches=16, budget=150.0, budget_batches=None, **SETTINGS)  # type: ignore[arg-type]


def test_a_budget_below_one_batch_of_the_bare_host_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"environment.budget=0.001: must be at least 0.002 GFLOPs, one training batch"
    ):
        clock(budget=0.001).check("host", 2e6)
    with pytest.raises(
        ValueError, match=r"environment.budget_batches=0.5: must be at least 1, one training batch of h"
    ):
        clock(budget=None, budget_batches=0.5).check("host", 2e6)
