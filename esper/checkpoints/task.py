"""The task that a controller was trained on, and command lines that evaluate it on that task."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from esper.blueprints import blueprints
from esper.checkpoints.origin import read_origin
from esper.checkpoints.runs import list_runs
from esper.command_line import override_key
from esper.config import compose_config, flatten, import_plugins, outline_host
from esper.controllers import PRETRAINED, find_checkpoint
from esper.ppo import read_checkpoint

TASK = (
    "host",
    "data",
    "tasks",
    "slots",
    "actions",
    "lifecycle",
    "environment",
    "optimizer",
    "governor",
    "reward",
    "gamma",
)
LOCAL_KEYS = (  # do not change an episode, or only its last bits
    "environment.envs",
    "environment.threads",
    "environment.workers",
    "optimizer.build.fused",
    "data.root",
    "data.device",
)


def checkpoint_names(value: object) -> list[str]:
    """The checkpoints in the value of `ckpt`: none, one or several."""
    if value is None:
        return []
    return [str(name) for name in value] if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]


def add_task_overrides(arguments: Sequence[str]) -> list[str]:
    """The command line with the task of its first checkpoint, unless it has an experiment or resumes."""
    checkpoints = [argument for argument in arguments if override_key(argument) == "ckpt"]
    keys = set(map(override_key, arguments))
    if not checkpoints or {"experiment", "resume"} & keys:
        return list(arguments)
    names = _parse_checkpoints(checkpoints[-1])
    if names is None:
        return list(arguments)  # Hydra reports the error
    own = [o for o in task_overrides(names) if not {override_key(o), override_key(o).split(".")[0]} & keys]
    position = arguments.index(checkpoints[-1])  # flags stay next to their values
    return [*arguments[:position], *own, *arguments[position:]]


def resolve_checkpoint_paths(arguments: Sequence[str]) -> list[str]:
    """The command line with absolute paths in `ckpt`; the directory of a sweep becomes those of all its jobs."""
    return [_resolve_paths(argument) if override_key(argument) == "ckpt" else argument for argument in arguments]


def _resolve_paths(argument: str) -> str:
    names = _parse_checkpoints(argument)
    if names is None or not all(name in PRETRAINED or Path(name).exists() for name in names):
        return argument  # the error is reported where the checkpoint is read
    paths = [path for name in names for path in ([name] if name in PRETRAINED else _job_paths(name))]
    quoted = ",".join("'{}'".format(path.replace("'", "\\'")) for path in paths)
    return f"ckpt=[{quoted}]"


def _job_paths(name: str) -> list[str]:
    return [str(run.resolve()) for run in list_runs(Path(name))]


def _parse_checkpoints(argument: str) -> list[str] | None:
    """The checkpoints in `ckpt=...`; None if Hydra refuses it."""
    value = argument.partition("=")[2]
    try:
        return checkpoint_names(compose_config("evaluate", [argument]).ckpt)
    except (HydraException, OmegaConfBaseException):
        if "," in value and not value.startswith(("[", "'", '"')):
            raise ValueError(f"{argument}: must be a list for several checkpoints, ckpt=[A,B].") from None
        return None


def task_overrides(names: Sequence[str]) -> list[str]:
    """The overrides of the first checkpoint's run that describe its task."""
    if not names:
        return []
    overrides = read_origin(find_checkpoint(names[0])).overrides
    return [
        override for override in overrides if override_key(override).split(".")[0] in (*TASK, "experiment", "ablation")
    ]


def apply_trained_values(typed: DictConfig, overrides: Sequence[str], names: Sequence[str]) -> DictConfig:
    """Set values of the first checkpoint's task where presets or registered blueprints have changed since its training.

    `typed` is composed from `overrides`; keys that are set there do not change.
    """
    if not names:
        return typed
    checkpoint = find_checkpoint(names[0])
    origin, own = read_origin(checkpoint), task_overrides(names)
    new_keys = {override_key(override) for override in overrides if override not in own}
    experiments = [[o for o in some if override_key(o) == "experiment"] for some in (own, overrides)]
    if experiments[0] == experiments[1]:  # the same task
        saved, before, now = flatten(origin.config), flatten(compose_config("evaluate", own)), flatten(typed)
        for key, value in saved.items():
            group = key.split(".")[0]
            is_task_key = group in TASK and key not in LOCAL_KEYS and group not in new_keys
            if is_task_key and key in now and now[key] == before.get(key) != value:
                OmegaConf.update(typed, key, value)
    trained = read_checkpoint(checkpoint).metadata.layout.blueprints
    if typed.slots.blueprints is None and not {"slots", "slots.blueprints"} & new_keys:
        import_plugins(typed)
        if set(trained) <= set(blueprints(outline_host(typed).topology)):
            OmegaConf.update(typed, "slots.blueprints", list(trained))
    return typed


def task_settings(config: DictConfig, groups: Sequence[str] = TASK) -> dict[str, Any]:
    """The flat settings of a configuration's task, without keys of the machine."""
    resolved = OmegaConf.to_container(config, resolve=True)
    assert isinstance(resolved, dict)
    if "_target_" not in resolved.get("tasks", {}):
        resolved.pop("tasks", None)  # host and data are the only task
    settings = flatten(OmegaConf.create({group: resolved[group] for group in groups if group in resolved}))
    return {key: value for key, value in settings.items() if key not in LOCAL_KEYS}


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two tasks, as lines of text."""
    keys = [key for key in {**before, **now} if _setting(before, key) != _setting(now, key)]
    hosts = []
    if _host_names(before) != _host_names(now):
        hosts = [f"host: {_describe_hosts(before)} -> {_describe_hosts(now)}"]
        keys = [key for key in keys if not key.startswith("host.") or _is_shared_host(key, before, now)]
    return [*hosts, *(f"{key}: {before.get(key)} -> {now.get(key)}" for key in keys)]


def _describe_hosts(task: Mapping[str, Any]) -> str:
    """The names of the hosts that episodes are drawn from, or the settings of the only host."""
    if names := _host_names(task):
        return f"one of {', '.join(names)}"
    own = {key.removeprefix("host."): value for key, value in task.items() if key.startswith("host.")}
    return f"one with {', '.join(f'{key}={value}' for key, value in own.items() if key != '_target_')}"


def _host_names(task: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(key.split(".")[2] for key in task if key.startswith("host.hosts.")))


def _is_shared_host(key: str, *tasks: Mapping[str, Any]) -> bool:
    """Whether a key is of a host that all tasks have."""
    return key.startswith("host.hosts.") and all(key.split(".")[2] in _host_names(task) for task in tasks)


def _setting(task: Mapping[str, Any], key: str) -> Any:
    """The value of a key. An empty list counts as missing: keys such as slots.plugins are newer than some tasks."""
    value = task.get(key)
    return None if value == [] else value
