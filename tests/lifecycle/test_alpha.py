import pytest
import torch

from esper.lifecycle.alpha import Curve, curve_progress, ramp


@pytest.mark.parametrize("curve", Curve)
def test_a_curve_is_monotone_and_reaches_its_ends_exactly(curve: Curve) -> None:
    t = torch.linspace(-0.5, 1.5, 20_001)
    values = curve_progress(torch.full(t.shape, int(curve)), t)
    assert (values.diff() >= 0).all()
    assert (values[t <= 0] == 0).all()
    assert (values[t >= 1] == 1).all()
    assert values[(t > 0.4) & (t < 0.6)].diff().sum() > 0.15


def test_steeper_sigmoids_stay_lower_before_the_middle() -> None:
    early = curve_progress(
        torch.tensor([Curve.SIGMOID_GENTLE, Curve.SIGMOID, Curve.SIGMOID_SHARP]), torch.full((3,), 0.25)
    )
    assert early[0] > early[1] > early[2] > 0
    middle = curve_progress(torch.arange(len(Curve)), torch.full((len(Curve),), 0.5))
    torch.testing.assert_close(middle, torch.full_like(middle, 0.5))


def test_a_ramp_of_zero_ticks_reaches_its_target_immediately() -> None:
    zero = torch.tensor([0])
    assert ramp(torch.tensor([0.3]), torch.tensor([0.7]), zero, zero, zero).item() == torch.tensor(0.7).item()


@pytest.mark.parametrize("curve", Curve)
@pytest.mark.parametrize(("start", "target"), [(0.0, 1.0), (0.0, 0.7), (1.0, 0.5), (0.7, 0.0)])
def test_a_ramp_is_monotone_and_reaches_its_target(curve: Curve, start: float, target: float) -> None:
    done = torch.arange(9)
    alpha = ramp(
        torch.full((9,), start), torch.full((9,), target), done, torch.full((9,), 8), torch.full((9,), int(curve))
    )
    steps = alpha.diff() * (1 if target > start else -1)
    assert (steps >= 0).all()
    assert alpha[0] == torch.tensor(start)
    assert alpha[8] == torch.tensor(target)
