"""The directory of the configuration, and its composition outside of a command line."""

from collections.abc import Sequence
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

_PACKAGED = Path(__file__).parent.parent / "conf"  # in an installed wheel
BUILT_IN_PROVIDERS = ("hydra", "main", "schema")  # of the sources that Hydra searches by itself
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent.parent / "conf"


def compose_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a configuration as the command line does; a running Hydra application is not changed."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(config_name=name, overrides=[*overrides, *_extra_search_path()])
    finally:
        GlobalHydra.instance().hydra = running


def _extra_search_path() -> list[str]:
    """An override with the search path that the user added to the running application."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    added = [f"'{source.schema}://{source.path}'" for source in sources if source.provider not in BUILT_IN_PROVIDERS]
    return [f"hydra.searchpath=[{','.join(added)}]"] if added else []


def group_names() -> list[str]:
    """The top-level groups of the configuration."""
    return [path.name for path in CONF.iterdir() if path.is_dir()]


def chosen_options() -> dict[str, str]:
    """The chosen option of each group; empty outside of a Hydra application."""
    if not HydraConfig.initialized():
        return {}
    choices = HydraConfig.get().runtime.choices
    return {name: str(option) for name, option in choices.items() if "/" not in name and "@" not in name}
