"""Ranges of the settings of a task."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.tasks.ranges import check_range, draw


def drawn(setting: object, count: int = 400) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    return [draw(setting, generator) for _ in range(count)]


@given(st.integers(1, 50), st.integers(0, 50), st.sampled_from(["between", "log"]))
def test_whole_numbers_stay_within_their_range(low: int, width: int, kind: str) -> None:
    values = drawn({kind: [low, low + width]}, 50)
    assert all(isinstance(value, int) and low <= value <= low + width for value in values)


def test_every_whole_number_of_a_range_is_drawn() -> None:
    assert set(drawn({"between": [2, 4]})) == {2, 3, 4}
    assert set(drawn({"log": [4, 8]})) == {4, 5, 6, 7, 8}
    assert set(drawn({"choice": ["a", None]})) == {"a", None}


def test_log_has_equal_shares_for_equal_ratios() -> None:
    logarithms = [math.log10(value) for value in drawn({"log": [1.0, 100.0]}, 2000)]
    assert 0.95 < sum(logarithms) / len(logarithms) < 1.05
    assert all(0 <= value <= 2 for value in logarithms)


def test_a_plain_value_is_itself_and_takes_one_random_number_like_a_range() -> None:
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    assert draw(5, first) == 5
    draw({"between": [0, 9]}, second)
    assert draw({"between": [0.0, 1.0]}, first) == draw({"between": [0.0, 1.0]}, second)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"between": [1, 2], "log": [1, 2]}, "must be a value, or a range with one key of choice, between, log"),
        ({"uniform": [1, 2]}, "must be a value, or a range with one key of choice, between, log"),
        ({"choice": []}, "must be a list that is not empty"),
        ({"between": [3, 2]}, "must be two numbers, the smaller one first"),
        ({"log": [0, 2]}, "must be two numbers above 0, the smaller one first"),
        ({"between": ["a", "b"]}, "must be two numbers, the smaller one first"),
    ],
)
def test_a_range_that_nothing_can_be_drawn_from_is_refused(setting: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"^tasks\.host\.channels") as error:
        check_range("tasks.host.channels", setting)
    assert message in str(error.value)
