import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz_configuration import EXPERIMENTS, HOSTILE, attempt, is_sentence, keys


def quote(text: str) -> str:
    return "'{}'".format(text.replace("\\", "\\\\").replace("'", "\\'"))


values = st.sampled_from(HOSTILE) | st.text(max_size=5).map(quote) | st.floats().map(str) | st.integers(-5, 5).map(str)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@settings(max_examples=100)
@given(data=st.data())
def test_a_hostile_override_builds_or_ends_in_one_sentence(experiment: str, data: st.DataObject) -> None:
    override = f"{data.draw(st.sampled_from(keys(experiment)))}={data.draw(values)}"
    message = attempt(experiment, override)
    assert is_sentence(message), message


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@settings(max_examples=5)
@given(data=st.data())
def test_a_hostile_override_trains_or_ends_in_one_sentence(experiment: str, data: st.DataObject) -> None:
    override = f"{data.draw(st.sampled_from(keys(experiment)))}={data.draw(values)}"
    message = attempt(experiment, override, run=True)
    assert is_sentence(message), message
