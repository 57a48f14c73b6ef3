"""Hydra configuration: compose, check, and build objects from it."""

from esper.config.build import (
    build,
    build_action_space,
    build_distribution,
    build_environment,
    build_padded_space,
    build_vector_env,
    build_with,
    grows_hosts,
    host_nodes,
    host_variants,
    known_tasks,
    load_preset,
    outline_host,
    task_specs,
    variant_nodes,
)
from esper.config.compose import chosen_options, compose_config, flatten, typed_overrides
from esper.config.errors import describe_error, remove_empty_run
from esper.config.migrate import migrate_config
from esper.config.validation import (
    check_config,
    check_training_config,
    check_tuning_config,
    import_plugins,
    module_exists,
)

__all__ = [
    "build",
    "build_action_space",
    "build_distribution",
    "build_environment",
    "build_padded_space",
    "build_vector_env",
    "build_with",
    "check_config",
    "check_training_config",
    "check_tuning_config",
    "chosen_options",
    "compose_config",
    "describe_error",
    "flatten",
    "grows_hosts",
    "host_nodes",
    "host_variants",
    "import_plugins",
    "known_tasks",
    "load_preset",
    "migrate_config",
    "module_exists",
    "outline_host",
    "remove_empty_run",
    "task_specs",
    "typed_overrides",
    "variant_nodes",
]
