"""What a trained controller learned on, and the command line that plays it there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from esper.config import compose_config
from esper.learners.origin import PRETRAINED, locate, origin_of
from esper.resume import flat, key_of, runs_in

TASK = ("host", "data", "slots", "actions", "lifecycle", "environment", "optimizer", "governor", "reward", "gamma")
ELSEWHERE = ("environment.envs", "environment.threads", "data.root", "data.device")  # change nothing in an episode


def named(value: object) -> list[str]:
    """The checkpoints that the key `ckpt` names: none, one or several."""
    if value is None:
        return []
    return [str(name) for name in value] if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]


def beside(arguments: Sequence[str]) -> list[str]:
    """A command line whose task, unless an experiment is typed, is that of the first checkpoint it names."""
    given = [argument for argument in arguments if key_of(argument) == "ckpt"]
    if not given or {"experiment", "resume"} & set(map(key_of, arguments)):
        return list(arguments)
    names = _typed(given[-1])
    if names is None:
        return list(arguments)  # Hydra will say what is wrong with it
    anew = {key_of(argument) for argument in arguments}
    own = [o for o in task_overrides(names) if not {key_of(o), key_of(o).split(".")[0]} & anew]
    place = arguments.index(given[-1])  # flags and what belongs to them stay together
    return [*arguments[:place], *own, *arguments[place:]]


def absolute(arguments: Sequence[str]) -> list[str]:
    """A command line that names the same checkpoints from any directory; a sweep's is all that its jobs have."""
    return [_absolute(argument) if key_of(argument) == "ckpt" else argument for argument in arguments]


def _absolute(argument: str) -> str:
    names = _typed(argument)
    if names is None or not all(name in PRETRAINED or Path(name).exists() for name in names):
        return argument  # what is wrong with it is said elsewhere
    found = [run for name in names for run in ([name] if name in PRETRAINED else _runs(name))]
    inside = ",".join("'{}'".format(name.replace("'", "\\'")) for name in found)
    return f"ckpt=[{inside}]"


def _runs(name: str) -> list[str]:
    return [str(run.resolve()) for run in runs_in(Path(name))]


def _typed(argument: str) -> list[str] | None:
    """The checkpoints that an argument names; None if Hydra would not understand it."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except OverrideParseException:
        return None
    if override.is_sweep_override():
        raise ValueError(f"{argument}: several checkpoints are written as a list, ckpt=[A,B].")
    return named(override.value())


def task_overrides(names: Sequence[str]) -> list[str]:
    """The overrides of the first checkpoint's run that say what it was trained on."""
    if not names:
        return []
    overrides = origin_of(locate(names[0])).overrides
    return [override for override in overrides if key_of(override).split(".")[0] in (*TASK, "experiment", "ablation")]


def as_trained(typed: DictConfig, overrides: Sequence[str], names: Sequence[str]) -> DictConfig:
    """`typed`, with the first checkpoint's own values where presets have changed since it was trained.

    `overrides` are all that `typed` was composed from.
    """
    own = task_overrides(names)
    experiments = [[o for o in some if key_of(o) == "experiment"] for some in (own, overrides)]
    if not names or experiments[0] != experiments[1]:  # another task was typed
        return typed
    anew = {key_of(override) for override in overrides if override not in own}
    saved = flat(origin_of(locate(names[0])).config)
    before, now = flat(compose_config("evaluate", own)), flat(typed)
    for key, value in saved.items():
        group = key.split(".")[0]
        kept = group in TASK and key not in ELSEWHERE and group not in anew
        if kept and key in now and now[key] == before.get(key) != value:
            OmegaConf.update(typed, key, value)
    return typed


def task_of(config: DictConfig, groups: Sequence[str] = TASK) -> dict[str, Any]:
    """What makes a task of a configuration, every key with its value; not how many play at once, or where."""
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    shown = flat(OmegaConf.create({group: found[group] for group in groups if group in found}))
    return {key: value for key, value in shown.items() if key not in ELSEWHERE}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
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
