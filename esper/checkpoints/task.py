"""What a trained controller learned on, and the command line that plays it there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from esper.blueprints import blueprints
from esper.checkpoints.origin import PRETRAINED, find_checkpoint, read_origin
from esper.checkpoints.runs import list_runs
from esper.config import compose_config, flatten, import_plugins, outline_host, override_key
from esper.ppo import read_checkpoint

TASK = ("host", "data", "slots", "actions", "lifecycle", "environment", "optimizer", "governor", "reward", "gamma")
LOCAL_KEYS = ("environment.envs", "environment.threads", "data.root", "data.device")  # change nothing in an episode


def checkpoint_names(value: object) -> list[str]:
    """The checkpoints that the key `ckpt` names: none, one or several."""
    if value is None:
        return []
    return [str(name) for name in value] if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]


def add_task_overrides(arguments: Sequence[str]) -> list[str]:
    """A command line whose task, unless an experiment is typed, is that of the first checkpoint it names."""
    given = [argument for argument in arguments if override_key(argument) == "ckpt"]
    if not given or {"experiment", "resume"} & set(map(override_key, arguments)):
        return list(arguments)
    names = _typed(given[-1])
    if names is None:
        return list(arguments)  # Hydra will say what is wrong with it
    anew = {override_key(argument) for argument in arguments}
    own = [o for o in task_overrides(names) if not {override_key(o), override_key(o).split(".")[0]} & anew]
    place = arguments.index(given[-1])  # flags and what belongs to them stay together
    return [*arguments[:place], *own, *arguments[place:]]


def resolve_checkpoint_paths(arguments: Sequence[str]) -> list[str]:
    """A command line that names the same checkpoints from any directory; a sweep's is all that its jobs have."""
    return [_absolute(argument) if override_key(argument) == "ckpt" else argument for argument in arguments]


def _absolute(argument: str) -> str:
    names = _typed(argument)
    if names is None or not all(name in PRETRAINED or Path(name).exists() for name in names):
        return argument  # what is wrong with it is said elsewhere
    found = [run for name in names for run in ([name] if name in PRETRAINED else _runs(name))]
    inside = ",".join("'{}'".format(name.replace("'", "\\'")) for name in found)
    return f"ckpt=[{inside}]"


def _runs(name: str) -> list[str]:
    return [str(run.resolve()) for run in list_runs(Path(name))]


def _typed(argument: str) -> list[str] | None:
    """The checkpoints that an argument names; None if Hydra would not understand it."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except OverrideParseException:
        return None
    if override.is_sweep_override():
        raise ValueError(f"{argument}: several checkpoints are written as a list, ckpt=[A,B].")
    return checkpoint_names(override.value())


def task_overrides(names: Sequence[str]) -> list[str]:
    """The overrides of the first checkpoint's run that say what it was trained on."""
    if not names:
        return []
    overrides = read_origin(find_checkpoint(names[0])).overrides
    return [
        override for override in overrides if override_key(override).split(".")[0] in (*TASK, "experiment", "ablation")
    ]


def apply_trained_values(typed: DictConfig, overrides: Sequence[str], names: Sequence[str]) -> DictConfig:
    """`typed`, with the first checkpoint's values where presets, or the registered blueprints, have changed since.

    `overrides` are those that `typed` was composed from.
    """
    if not names:
        return typed
    checkpoint = find_checkpoint(names[0])
    origin, own = read_origin(checkpoint), task_overrides(names)
    anew = {override_key(override) for override in overrides if override not in own}
    experiments = [[o for o in some if override_key(o) == "experiment"] for some in (own, overrides)]
    if experiments[0] == experiments[1]:  # no other task was typed
        saved, before, now = flatten(origin.config), flatten(compose_config("evaluate", own)), flatten(typed)
        for key, value in saved.items():
            group = key.split(".")[0]
            kept = group in TASK and key not in LOCAL_KEYS and group not in anew
            if kept and key in now and now[key] == before.get(key) != value:
                OmegaConf.update(typed, key, value)
    trained = read_checkpoint(checkpoint).metadata.layout.blueprints
    if typed.slots.blueprints is None and not {"slots", "slots.blueprints"} & anew:
        import_plugins(typed)
        if set(trained) <= set(blueprints(outline_host(typed).topology)):
            OmegaConf.update(typed, "slots.blueprints", list(trained))
    return typed


def task_settings(config: DictConfig, groups: Sequence[str] = TASK) -> dict[str, Any]:
    """What makes a task of a configuration, every key with its value; not how many play at once, or where."""
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    shown = flatten(OmegaConf.create({group: found[group] for group in groups if group in found}))
    return {key: value for key, value in shown.items() if key not in LOCAL_KEYS}


def describe_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys of two tasks that are not alike, in words."""
    keys = [key for key in {**then, **now} if _value(then, key) != _value(now, key)]
    hosts = []
    if _drawn(then) != _drawn(now):
        hosts = [f"host: {_hosts(then)} -> {_hosts(now)}"]
        keys = [key for key in keys if not key.startswith("host.") or _shared(key, then, now)]
    return [*hosts, *(f"{key}: {then.get(key)} -> {now.get(key)}" for key in keys)]


def _hosts(task: Mapping[str, Any]) -> str:
    """What hosts a task draws from, by name, or what makes its only one."""
    if names := _drawn(task):
        return f"one of {', '.join(names)}"
    own = {key.removeprefix("host."): value for key, value in task.items() if key.startswith("host.")}
    return f"one with {', '.join(f'{key}={value}' for key, value in own.items() if key != '_target_')}"


def _drawn(task: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(key.split(".")[2] for key in task if key.startswith("host.hosts.")))


def _shared(key: str, *tasks: Mapping[str, Any]) -> bool:
    """Whether a key is of a host that all tasks draw."""
    return key.startswith("host.hosts.") and all(key.split(".")[2] in _drawn(task) for task in tasks)


def _value(task: Mapping[str, Any], key: str) -> Any:
    """What a key says; an empty list says no more than a key that was not there yet."""
    found = task.get(key)
    return None if found == [] else found
