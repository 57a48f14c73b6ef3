"""Hydra configuration: compose, check, and build objects from it."""

from esper.config.build import (
    build,
    build_action_space,
    build_environment,
    build_vector_env,
    build_with,
    grows_hosts,
    host_nodes,
    load_preset,
    outline_host,
)
from esper.config.compose import CONF, chosen_options, compose_config
from esper.config.errors import remove_empty_run, run_app
from esper.config.migrate import check_renamed, migrate_config
from esper.config.overrides import flatten, override_key
from esper.config.validation import (
    check_config,
    check_top_level_keys,
    check_training_config,
    import_plugins,
    module_exists,
)

__all__ = [
    "CONF",
    "build",
    "build_action_space",
    "build_environment",
    "build_vector_env",
    "build_with",
    "check_config",
    "check_renamed",
    "check_top_level_keys",
    "check_training_config",
    "chosen_options",
    "compose_config",
    "flatten",
    "grows_hosts",
    "host_nodes",
    "import_plugins",
    "load_preset",
    "migrate_config",
    "module_exists",
    "outline_host",
    "override_key",
    "remove_empty_run",
    "run_app",
]
