import pytest
from hydra import compose, initialize_config_dir

from esper.command_line import CONF
from esper.config import check_config, check_training_config, compose_config, load_preset


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"^preset=actions/small: must be one of actions/core, actions/full, actions/lean\.$"
    ):
        load_preset("actions/small")


def test_loading_a_preset_does_not_change_a_running_hydra_application() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        load_preset("lifecycle/default", steps=10)
        assert compose(config_name="actions/core").actions.heads[0] == "op"


@pytest.mark.parametrize("experiment", [[], ["+experiment=oracle"]])
def test_actions_without_fossilize_need_an_automatic_commit(experiment: list[str]) -> None:
    sentence = (
        r"^lifecycle\.commit=explicit: must be auto \(as in lifecycle=quick\), because actions\.ops=\['WAIT', 'GERMI"
    )
    with pytest.raises(ValueError, match=sentence):
        check_training_config(compose_config("run", [*experiment, "actions=lean"]))
    check_training_config(compose_config("run", [*experiment, "actions=lean", "lifecycle=quick"]))
    if not experiment:
        with pytest.raises(ValueError, match=sentence):
            check_config(compose_config("evaluate", ["actions=lean"]))
        check_config(compose_config("evaluate", ["actions=lean", "lifecycle=quick"]))
    check_training_config(compose_config("run", ["+experiment=cartpole_memory", "actions=lean"]))


@pytest.mark.parametrize("override", ["collector=[null]", "actions=[[]]", "logger=[1,2]", "logger=[tensorboard,]"])
def test_a_list_of_options_that_are_not_names_is_refused(override: str) -> None:
    with pytest.raises(ValueError, match=r": must be an option, or a list of options\.$"):
        compose_config("run", [override])


def test_several_options_of_a_group_are_a_list() -> None:
    assert set(compose_config("run", ["logger=[tensorboard,csv]"]).logger) == {"tensorboard", "csv"}
    assert "logger" not in compose_config("run", ["logger=[]"])


def test_the_message_of_a_constructor_is_not_wrapped_by_hydra() -> None:
    with pytest.raises(ValueError, match=r"^host\.kernel=2: must be odd and at least 1\.$"):
        load_preset("host/cifar_baseline", kernel=2)
