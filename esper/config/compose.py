"""Where the configuration lives, and how it is composed outside of a command line."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

_PACKAGED = Path(__file__).parent.parent / "conf"  # in an installed wheel
BUILT_IN_PROVIDERS = ("hydra", "main", "schema")  # where Hydra finds configuration by itself
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent.parent / "conf"


def compose_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """A configuration, composed as by the command line; a Hydra application that is running stays as it is."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(config_name=name, overrides=[*overrides, *_extra_search_path()])
    finally:
        GlobalHydra.instance().hydra = running


def _extra_search_path() -> list[str]:
    """The directories of configuration that the running application was given besides ours, as an override."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    given = [f"'{source.schema}://{source.path}'" for source in sources if source.provider not in BUILT_IN_PROVIDERS]
    return [f"hydra.searchpath=[{','.join(given)}]"] if given else []


def group_names() -> list[str]:
    return [path.name for path in CONF.iterdir() if path.is_dir()]


def chosen_options() -> dict[str, str]:
    """Which option of each group a run on the command line has."""
    if not HydraConfig.initialized():
        return {}
    choices = HydraConfig.get().runtime.choices
    return {name: str(option) for name, option in choices.items() if "/" not in name and "@" not in name}
