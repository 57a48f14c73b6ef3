"""What the commands need before anything else is imported: the configuration's directory, help, and overrides."""

import re
from collections.abc import Sequence
from pathlib import Path
from string import Template

import yaml  # type: ignore[import-untyped]

from esper.renames import renamed_override

_PACKAGED = Path(__file__).parent / "conf"  # in an installed wheel
CONF = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent / "conf"
NOT_NAMES = {"null", "true", "false", "nan", "inf"}  # values that Hydra does not read as text
HELP_FLAGS = {"--help", "-h"}
TASK_EXPERIMENT = "zoo_ppo"  # whose settings tasks have, unless another experiment has their distribution
RECORDS = "episodes.jsonl"  # a directory with this file has an evaluation, of one of several budgets in budget_*


def help_text(name: str) -> str:
    """The help of a command. Hydra's own help takes seconds, because it composes the configuration for every group."""
    template = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    options: dict[str, list[str]] = {}
    for path in sorted(CONF.glob("*/**/*.yaml")):
        options.setdefault(path.parent.relative_to(CONF).as_posix(), []).append(path.stem)
    groups = [f"  {group}: {', '.join(names)}" for group, names in options.items()]
    return Template(template).substitute(APP_CONFIG_GROUPS="\n".join(groups))


def override_key(override: str) -> str:
    """The key of an override: `ppo.lr` of `+ppo.lr=1e-3`."""
    return override.partition("=")[0].lstrip("+~")


def has_key(arguments: Sequence[str], key: str) -> bool:
    """Whether an override sets a key."""
    return key in map(override_key, arguments)


def move_debug_last(arguments: Sequence[str]) -> list[str]:
    """The arguments with `debug=...` as `+debug=...` behind all other overrides, so that it overrides an experiment."""
    debug = [argument for argument in arguments if override_key(argument) == "debug"]
    others = [argument for argument in arguments if argument not in debug]
    overrides = [index for index, argument in enumerate(others) if "=" in argument and not argument.startswith("-")]
    end = overrides[-1] + 1 if overrides else 0  # overrides behind a flag, such as --cfg job, are not understood
    return [*others[:end], *(f"+{argument.lstrip('+')}" for argument in debug), *others[end:]]


def add_task_experiment(arguments: Sequence[str]) -> list[str]:
    """The arguments with `split=...` as `tasks.split=...`, and with the experiment of a typed task distribution.

    Its tasks are trained and measured with the settings of that experiment. Nothing is added if an experiment is typed,
    or if a checkpoint or an evaluation to resume has one.
    """
    changed = [f"tasks.{each.lstrip('+')}" if override_key(each) == "split" else each for each in arguments]
    tasks = [each for each in changed if override_key(each) == "tasks"]
    if not tasks or tasks[-1] == "tasks=single" or {"experiment", "ckpt", "resume"} & set(map(override_key, changed)):
        return changed
    experiment = find_experiment(tasks[-1].partition("=")[2])
    position = changed.index(tasks[-1])  # flags stay next to their values
    return [*changed[:position], f"+experiment={experiment}", *changed[position:]]


def find_experiment(tasks: str) -> str:
    """The experiment that trains controllers on a task distribution; TASK_EXPERIMENT if none has it by default."""
    for path in sorted((CONF / "experiment").glob("*.yaml")):
        defaults = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("defaults", [])
        if {"override /tasks": tasks} in defaults:
            return path.stem
    return TASK_EXPERIMENT


def check_renamed(arguments: Sequence[str]) -> None:
    """Refuse keys and options of version 0.1 on the command line; the message has the new name."""
    for argument in arguments:
        new = renamed_override(argument)
        if new == argument:
            continue
        old_key, key = override_key(argument), override_key(new)
        if old_key != key:
            raise ValueError(f"{old_key}: is now {key}.")
        raise ValueError(f"{argument}: is now {new}.")


def check_unused_directory(arguments: Sequence[str]) -> None:
    """Refuse a directory with another evaluation, before Hydra writes into it."""
    typed = {override_key(argument): argument.partition("=")[2].strip("'") for argument in arguments}
    directory = Path(typed.get("hydra.run.dir", ""))
    if "hydra.run.dir" in typed and ((directory / RECORDS).exists() or any(directory.glob(f"budget_*/{RECORDS}"))):
        raise ValueError(
            f"hydra.run.dir={directory}: must be a directory without an evaluation; resume={directory} continues it."
        )


def check_options(arguments: Sequence[str]) -> None:
    """Refuse a list of options that are not names, such as `logger=[1]`: Hydra fails on it with a TypeError."""
    for argument in arguments:
        value = argument.partition("=")[2].strip()
        if (CONF / override_key(argument)).is_dir() and value.startswith("[") and value != "[]":
            names = [name.strip() for name in value[1:-1].split(",")]
            if not all(re.fullmatch(r"[A-Za-z_][\w/.-]*", name) and name not in NOT_NAMES for name in names):
                raise ValueError(f"{argument}: must be an option, or a list of options.")
