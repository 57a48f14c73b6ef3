"""Compose a configuration outside of a command line; flatten it; the chosen options of a running application."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from esper.command_line import CONF, check_options

BUILT_IN_PROVIDERS = ("hydra", "main", "schema")  # of the sources that Hydra searches by itself


def compose_config(name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """Compose a configuration as the command line does; a running Hydra application is not changed."""
    check_options(overrides)
    with _initialised():
        return compose(config_name=name, overrides=[*overrides, *_extra_search_path()])


@contextmanager
def _initialised() -> Iterator[None]:
    """Hydra with the configuration of esper: the running application if it is esper's, else a temporary one."""
    application = GlobalHydra.instance()
    running = application.hydra
    if running is not None and str(CONF) in [source.path for source in running.config_loader.get_sources()]:
        yield
        return
    application.clear()  # a process has one Hydra application, and load_preset may be called inside that of a user
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            yield
    finally:
        application.clear()
        if running is not None:
            application.initialize(running)


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


def typed_overrides() -> list[str]:
    """The overrides of the running application; interpolations in them are not resolved."""
    overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    return [str(override) for override in overrides]


def flatten(config: DictConfig) -> dict[str, Any]:
    """Every value by its full key; interpolations are not resolved."""
    flat: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            flat[prefix] = node

    walk(OmegaConf.to_container(config, resolve=False), "")
    return flat
