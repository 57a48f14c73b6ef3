import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from esper.config import compose_config
from tests.fixtures_compose import COMPOSE
from tests.fuzz_configuration import EXPERIMENTS, HOSTILE, SMALL, attempt, is_sentence, keys


def quote(text: str) -> str:
    return "'{}'".format(text.replace("\\", "\\\\").replace("'", "\\'"))


values = st.sampled_from(HOSTILE) | st.text(max_size=5).map(quote) | st.floats().map(str) | st.integers(-5, 5).map(str)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@settings(max_examples=50)
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


@pytest.mark.parametrize("experiment", EXPERIMENTS)
@settings(max_examples=5)
@given(data=st.data())
def test_an_experiment_that_is_composed_quickly_equals_that_of_hydra(experiment: str, data: st.DataObject) -> None:
    override = f"{data.draw(st.sampled_from(keys(experiment)))}={data.draw(st.sampled_from(HOSTILE))}"
    overrides = [f"+experiment={experiment}", *SMALL[experiment], override]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ConfigLoaderImpl, "load_configuration", COMPOSE)
            expected = compose_config("run", overrides)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        with pytest.raises(type(error)):
            compose_config("run", overrides)
    else:
        composed = compose_config("run", overrides)
        assert OmegaConf.to_yaml(composed) == OmegaConf.to_yaml(expected)
        assert OmegaConf.is_struct(composed)
