"""Going on with a run or an evaluation: where it is, and its configuration with what was said anew."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from esper.checkpoints.runs import read_overrides, read_yaml
from esper.config import compose_config, flatten, migrate_config, override_key
from esper.renames import renamed_override

OUTPUTS, MULTIRUN = Path("outputs"), Path("multirun")
SWEEP = {"-m", "--multirun"}


@dataclass(frozen=True)
class ResumeKind:
    """What can be resumed.

    Arguments:
        config: the name of its configuration
        word: for it
        file: in its directory, that shows it has begun
        keys: which of its configuration's keys cannot change, or if `free`, which alone can
    """

    config: str
    word: str
    file: str
    keys: tuple[str, ...]
    free: bool

    def may_change(self, key: str) -> bool:
        named = any(key == name or key.startswith(f"{name}.") for name in self.keys)
        return named == self.free

    def is_one(self, directory: Path) -> bool:
        path = directory / ".hydra" / "config.yaml"
        if not path.is_file():
            return False
        return ("controllers" in OmegaConf.load(path)) == (self is EVALUATION)


RUN = ResumeKind("run", "run", "checkpoints", ("seed", "name", "start"), free=False)
EVALUATION = ResumeKind(
    "evaluate",
    "evaluation",
    "episodes.jsonl",
    ("controllers", "episodes", "ckpt", "reference", "schedules", "replay", "export", "environment.envs",
     "environment.threads"),
    free=True,
)  # fmt: skip


def resume_arguments(arguments: Sequence[str], kind: ResumeKind = RUN) -> list[str]:
    """The command line as Hydra should see it.

    `debug=...` comes last, so that it wins over an experiment. A resumed run goes on in its own directory, with the
    overrides it was started with before those that are typed now.
    """
    rest = [argument for argument in arguments if override_key(argument) != "debug"]
    debug = [f"+{argument.lstrip('+')}" for argument in arguments if override_key(argument) == "debug"]
    wanted = [argument.partition("=")[2] for argument in rest if override_key(argument) == "resume"]
    if not wanted or wanted[-1] in ("null", ""):
        return rest + debug
    if SWEEP & set(rest):
        if kind is not RUN:
            raise SystemExit(f"resume={wanted[-1]}: goes on with one {kind.word}; it cannot be given to a sweep.")
        typed = [argument for argument in rest if override_key(argument) != "resume" and argument not in SWEEP]
        return ["-m", *_sweep_arguments(typed, find_sweep(wanted[-1])), *debug]
    directory = find_run(wanted[-1], kind)
    earlier = read_overrides(directory)
    typed = [argument for argument in rest if override_key(argument) != "resume"]
    for argument in (*typed, *debug):
        if override_key(argument) in ("experiment", "debug") and argument not in earlier:
            raise SystemExit(f"{argument}: a resumed {kind.word} stays what it is; leave it out.")
    anew = {override_key(argument) for argument in typed}
    kept = [override for override in earlier if override_key(override) not in anew]
    quoted = str(directory).replace("'", "\\'")
    own = [*kept, f"resume='{quoted}'", f"hydra.run.dir='{quoted}'", "hydra.output_subdir=null"]
    place = next(index for index, argument in enumerate(rest) if override_key(argument) == "resume")
    before = [argument for argument in rest[:place] if argument in typed]
    return [*before, *own, *typed[len(before) :]]  # flags and what belongs to them stay together


def _sweep_arguments(typed: Sequence[str], directory: Path) -> list[str]:
    """The command line of a sweep, with what is typed now in its place, so that jobs keep their order."""
    found = read_yaml(directory / "multirun.yaml")
    if not isinstance(found, DictConfig) or "hydra" not in found:
        raise SystemExit(f"resume={directory}: its multirun.yaml does not say what was swept.")
    saved = OmegaConf.to_container(found.hydra.overrides, resolve=False)
    assert isinstance(saved, dict)
    earlier = [renamed_override(str(override)) for part in ("task", "hydra") for override in saved.get(part, [])]
    quoted = str(directory).replace("'", "\\'")
    kept = [override for override in earlier if override_key(override) not in ("hydra.mode", "sweep.skip_completed")]
    return list(
        {override_key(override): override for override in (*kept, *typed, f"hydra.sweep.dir='{quoted}'")}.values()
    )


def find_run(name: str, kind: ResumeKind = RUN) -> Path:
    """The directory that is meant."""
    if name != "latest":
        directory = Path(name)
        if not kind.is_one(directory):
            raise SystemExit(f"resume={name}: is no {kind.word}'s directory; it has no .hydra/config.yaml of one.")
        return directory
    begun = [path for path in OUTPUTS.glob(f"**/{kind.file}") if kind.is_one(path.parent)]
    if not begun:
        raise SystemExit(f"resume=latest: there is no {kind.word} under {OUTPUTS}/ here.")
    return max(begun, key=lambda path: path.stat().st_mtime_ns).parent


def find_sweep(name: str) -> Path:
    """The directory of the sweep that is meant."""
    if name != "latest":
        if not (Path(name) / "multirun.yaml").is_file():
            raise SystemExit(f"resume={name}: is no sweep's directory; it has no multirun.yaml.")
        return Path(name)
    begun = list(MULTIRUN.glob("**/multirun.yaml"))
    if not begun:
        raise SystemExit(f"resume=latest: there is no sweep under {MULTIRUN}/ here.")
    return max(begun, key=lambda path: path.stat().st_mtime_ns).parent


def merge_overrides(
    typed: DictConfig, directory: Path, kind: ResumeKind = RUN, overrides: Sequence[str] = ()
) -> tuple[DictConfig, list[str]]:
    """The saved configuration with what was typed now, and how it differs.

    `typed` is composed from all `overrides`, earlier and new; what the new ones change in it, they change in the saved.
    """
    found = OmegaConf.load(directory / ".hydra" / "config.yaml")
    assert isinstance(found, DictConfig)
    saved = migrate_config(found)
    earlier = read_overrides(directory)
    before, after = flatten(compose_config(kind.config, earlier)), flatten(typed)
    there = flatten(saved)
    for key in (override_key(override) for override in overrides if override not in earlier):
        if key in before and key in there:
            before[key] = there[key]  # a preset may have changed since; what is typed wins over what was saved
    after["resume"] = before["resume"] = None
    changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    for key in changed:
        if not kind.may_change(key):
            value = after.get(key)
            raise ValueError(f"{key}={value}: a resumed {kind.word} keeps its {key}={before.get(key)}.")
    with open_dict(saved):
        for key in (key for key in changed if key not in after):
            parent, leaf = _highest_removed(key, after)
            (OmegaConf.select(saved, parent) if parent else saved).pop(leaf, None)
        for key in (key for key in changed if key in after):
            OmegaConf.update(saved, key, after[key], force_add=True)
        saved.resume = None
    return saved, [f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed]


def _highest_removed(key: str, there: Mapping[str, Any]) -> tuple[str, str]:
    """The parent and name of the highest node above a key of which nothing is left."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count])
        if prefix not in there and not any(other.startswith(f"{prefix}.") for other in there):
            parts = parts[:count]
            break
    return ".".join(parts[:-1]), parts[-1]


def save_config(config: DictConfig, directory: Path, overrides: Sequence[str]) -> None:
    """So that the next resume knows what was changed by this one."""
    kept = [override for override in overrides if override_key(override) != "resume"]
    for name, content in (("config", OmegaConf.to_yaml(config)), ("overrides", OmegaConf.to_yaml(kept))):
        path = directory / ".hydra" / f"{name}.yaml"
        unfinished = path.with_suffix(".part")
        unfinished.write_text(content)
        os.replace(unfinished, path)
