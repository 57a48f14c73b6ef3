import math

import pytest

from esper.rewards import terms
from tests.rewards.fixtures_records import measured, record


@pytest.mark.parametrize("classes", [2, 10, 100, 50_257])
def test_the_loss_terms_scale_with_the_losses_of_a_task(classes: int) -> None:
    chance = math.log(classes)
    final = terms.FinalLoss(weight=1.0, base=chance, target=chance / 10)
    for loss, expected in ((chance, 0.0), (0.55 * chance, 0.5), (chance / 10, 1.0), (2 * chance, 0.0), (0.0, 1.0)):
        assert final(record(is_last=True, now=measured(loss=loss))).item() == pytest.approx(expected, abs=1e-5)
    step = terms.LossImprovement(weight=1.0, sigma=chance / 100, cap=5.0)
    reward = step(record(earlier=measured(loss=chance), now=measured(loss=0.98 * chance))).item()
    assert reward == pytest.approx(2.0, abs=1e-2)


def test_loss_terms_with_equal_base_and_target_are_refused() -> None:
    with pytest.raises(ValueError, match=r"base=1\.0: must be finite and above target=1\.0"):
        terms.FinalLoss(weight=1.0, base=1.0, target=1.0)
