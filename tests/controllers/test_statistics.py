import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.controllers import Moments, RunningStatistics
from tests.controllers.fixtures_policies import draws, policy


def fold(statistics: RunningStatistics, samples: torch.Tensor) -> None:
    statistics.fold(Moments.of(samples, torch.ones(samples.shape[:-1], dtype=torch.bool)))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 1000))
def test_folding_samples_in_parts_gives_the_same_as_all_at_once(sizes: list[int], rng_seed: int) -> None:
    samples = 3 * torch.randn(sum(sizes) + 2, 4, generator=draws(rng_seed)) + 5
    statistics = RunningStatistics(4)
    for part in samples.split([*sizes, 2]):
        fold(statistics, part)
    torch.testing.assert_close(statistics.mean, samples.double().mean(0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(statistics.variance, samples.double().var(0, unbiased=False), atol=1e-5, rtol=1e-5)


def test_momentum_is_the_weight_of_the_newest_moments() -> None:
    statistics = RunningStatistics(1, momentum=0.25)
    fold(statistics, torch.tensor([[1.0], [3.0]]))
    assert statistics.mean.item() == 2
    assert statistics.variance.item() == 1, "the first moments count in full"
    fold(statistics, torch.tensor([[6.0], [6.0]]))
    assert statistics.mean.item() == 2 + 0.25 * 4
    assert statistics.variance.item() == pytest.approx(0.75 * 1 + 0.25 * 0 + 0.25 * 0.75 * 16)


def test_empty_or_non_finite_moments_change_nothing() -> None:
    for momentum in (None, 0.5):
        statistics = RunningStatistics(2, momentum)
        fold(statistics, torch.randn(5, 2, generator=draws()))
        before = [part.clone() for part in statistics.buffers()]
        fold(statistics, torch.zeros(0, 2))
        fold(statistics, torch.tensor([[1.0, torch.inf]]))
        assert all(torch.equal(a, b) for a, b in zip(before, statistics.buffers(), strict=True))


def test_only_valid_samples_count() -> None:
    samples, valid = torch.tensor([[[1.0], [100.0]], [[3.0], [torch.nan]]]), torch.tensor([[True, False]] * 2)
    moments = Moments.of(samples, valid)
    assert moments.count == 2
    assert moments.mean.item() == 2
    assert moments.variance.item() == 1


def test_packed_moments_unpack_to_the_same_moments() -> None:
    moments = Moments.of(torch.randn(5, 3, generator=draws()), torch.ones(5, dtype=torch.bool))
    again = Moments.unpacked(moments.packed())
    assert all(torch.equal(a, b) for a, b in zip(vars(moments).values(), vars(again).values(), strict=True))


def test_samples_are_not_normalised_before_the_first_fold() -> None:
    statistics = RunningStatistics(2)
    samples = torch.tensor([[10.0, -10.0]])
    assert torch.equal(statistics.normalised(samples, min_std=0.1, clip=5.0), samples)
    fold(statistics, torch.tensor([[10.0, 0.0], [10.0, 2.0]]))
    scaled = statistics.normalised(torch.tensor([[10.5, 2.0], [99.0, 1.0]]), min_std=0.1, clip=5.0)
    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled, torch.tensor([[5.0, 1.0], [5.0, 0.0]]))


def test_the_statistics_are_part_of_the_policys_state_dict() -> None:
    mine, theirs = policy(), policy(rng_seed=1)
    base, slots = torch.randn(2, 3, 6, generator=draws()), torch.randn(2, 3, 3, 4, generator=draws())
    mine.fold(mine.moments(base, slots, torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)))
    theirs.load_state_dict(mine.state_dict())
    assert theirs.base_statistics.count == 6
    assert theirs.slot_statistics.count == 18
    assert torch.equal(mine.base_statistics.mean, theirs.base_statistics.mean)
