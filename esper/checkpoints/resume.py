"""Resume a run, a sweep or an evaluation: find its directory and merge its configuration with new overrides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from esper.checkpoints.runs import read_overrides, read_yaml
from esper.command_line import move_debug_last, override_key
from esper.config import compose_config, flatten, migrate_config
from esper.files import write_file
from esper.renames import renamed_override

OUTPUTS, MULTIRUN = Path("outputs"), Path("multirun")
MULTIRUN_FLAGS = {"-m", "--multirun"}


@dataclass(frozen=True)
class ResumeKind:
    """A kind of job that can be resumed: a run, an evaluation or a search.

    Arguments:
        config: name of the configuration
        word: name of the kind in messages
        file: file or directory that a job has once it has begun
        keys: keys that must not change; if `free`, the only keys that may change
        free: how `keys` is meant
        marker: key that only configurations of this kind have; empty for a run
    """

    config: str
    word: str
    file: str
    keys: tuple[str, ...]
    free: bool
    marker: str = ""

    def may_change(self, key: str) -> bool:
        is_listed = any(key == name or key.startswith(f"{name}.") for name in self.keys)
        return is_listed == self.free

    def is_one(self, directory: Path) -> bool:
        path = directory / ".hydra" / "config.yaml"
        if not path.is_file():
            return False
        saved = OmegaConf.load(path)
        found = next((kind.marker for kind in (EVALUATION, TUNING) if kind.marker in saved), "")
        return found == self.marker


RUN = ResumeKind("run", "run", "checkpoints", ("seed", "name", "start"), free=False)
EVALUATION = ResumeKind(
    "evaluate",
    "evaluation",
    "episodes.jsonl",
    ("controllers", "episodes", "ckpt", "reference", "primary", "schedules", "replay", "search", "budgets", "blueprint",
     "net2net_host", "export", "environment.envs", "environment.threads", "environment.workers"),
    free=True,
    marker="controllers",
)  # fmt: skip
TUNING = ResumeKind(
    "tune",
    "search",
    "tuning.jsonl",
    ("tune.episodes", "tune.gflops", "environment.envs", "environment.threads", "environment.workers"),
    free=True,
    marker="tune",
)


def resume_arguments(arguments: Sequence[str], kind: ResumeKind = RUN) -> list[str]:
    """The command line that Hydra gets.

    `debug=...` is last, so that it overrides an experiment. A resumed run writes into its own directory; its earlier
    overrides are before the new ones.
    """
    arguments = move_debug_last(arguments)
    rest = [argument for argument in arguments if override_key(argument) != "debug"]
    debug = [argument for argument in arguments if override_key(argument) == "debug"]
    requested = [argument.partition("=")[2] for argument in rest if override_key(argument) == "resume"]
    if not requested or requested[-1] in ("null", ""):
        return list(arguments)
    name = requested[-1].strip("'").replace("\\'", "'")  # the other ranks of a resumed run get it quoted
    if MULTIRUN_FLAGS & set(rest):
        if kind is not RUN:
            raise SystemExit(f"resume={name}: resumes one {kind.word}; leave out -m.")
        new = [argument for argument in rest if override_key(argument) != "resume" and argument not in MULTIRUN_FLAGS]
        return ["-m", *_sweep_arguments(new, find_sweep(name)), *debug]
    directory = find_run(name, kind)
    earlier = read_overrides(directory)
    new = [argument for argument in rest if override_key(argument) != "resume"]
    for argument in (*new, *debug):
        if override_key(argument) in ("experiment", "debug") and argument not in earlier:
            raise SystemExit(f"{argument}: cannot change in a resumed {kind.word}; leave it out.")
    new_keys = {override_key(argument) for argument in new}
    unchanged = [override for override in earlier if override_key(override) not in new_keys]
    quoted = str(directory).replace("'", "\\'")
    own = [*unchanged, f"resume='{quoted}'", f"hydra.run.dir='{quoted}'", "hydra.output_subdir=null"]
    position = next(index for index, argument in enumerate(rest) if override_key(argument) == "resume")
    before = [argument for argument in rest[:position] if argument in new]
    return [*before, *own, *new[len(before) :]]  # flags stay next to their values


def _sweep_arguments(new: Sequence[str], directory: Path) -> list[str]:
    """The command line of a sweep. New overrides replace earlier ones in position, so that jobs keep their order."""
    saved = read_yaml(directory / "multirun.yaml")
    if not isinstance(saved, DictConfig) or "hydra" not in saved:
        raise SystemExit(f"resume={directory}: its multirun.yaml has no overrides of a sweep.")
    overrides = OmegaConf.to_container(saved.hydra.overrides, resolve=False)
    assert isinstance(overrides, dict)
    earlier = [renamed_override(str(override)) for part in ("task", "hydra") for override in overrides.get(part, [])]
    own = [override for override in earlier if override_key(override) not in ("hydra.mode", "sweep.skip_completed")]
    quoted = str(directory).replace("'", "\\'")
    return list({override_key(override): override for override in (*own, *new, f"hydra.sweep.dir='{quoted}'")}.values())


def find_run(name: str, kind: ResumeKind = RUN) -> Path:
    """The directory of a run or an evaluation; `latest` is the one that was written last."""
    if name != "latest":
        directory = Path(name)
        if not kind.is_one(directory):
            raise SystemExit(f"resume={name}: must be latest or the directory of the {kind.word} to resume.")
        return directory
    begun = {  # an evaluation with several budgets has its files in a directory for each of them
        directory: path.stat().st_mtime_ns
        for path in sorted(OUTPUTS.glob(f"**/{kind.file}"), key=lambda path: path.stat().st_mtime_ns)
        for directory in (path.parent, path.parent.parent)
        if kind.is_one(directory)
    }
    if not begun:
        raise SystemExit(f"resume=latest: there is no {kind.word} under {OUTPUTS}/ here.")
    return max(begun, key=begun.__getitem__)


def find_sweep(name: str) -> Path:
    """The directory of a sweep; `latest` is the one that was started last."""
    if name != "latest":
        if not (Path(name) / "multirun.yaml").is_file():
            raise SystemExit(f"resume={name}: must be latest or the directory of the sweep to resume.")
        return Path(name)
    begun = list(MULTIRUN.glob("**/multirun.yaml"))
    if not begun:
        raise SystemExit(f"resume=latest: there is no sweep under {MULTIRUN}/ here.")
    return max(begun, key=lambda path: path.stat().st_mtime_ns).parent


def merge_overrides(
    typed: DictConfig, directory: Path, kind: ResumeKind = RUN, overrides: Sequence[str] = ()
) -> tuple[DictConfig, list[str]]:
    """The saved configuration with the new overrides applied, and a description of each change.

    `typed` is composed from all `overrides`, earlier and new. Its differences to the composition of the earlier ones
    are applied to the saved configuration.
    """
    loaded = OmegaConf.load(directory / ".hydra" / "config.yaml")
    assert isinstance(loaded, DictConfig)
    saved = migrate_config(loaded)
    earlier = read_overrides(directory)
    before, after = flatten(compose_config(kind.config, earlier)), flatten(typed)
    saved_values = flatten(saved)
    for key in (override_key(override) for override in overrides if override not in earlier):
        if key in before:  # a preset may have changed, or the key may be new; new overrides win over saved values
            before[key] = saved_values.get(key)
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


def _highest_removed(key: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """The parent and name of the highest node above a key that has no values left."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count])
        if prefix not in values and not any(other.startswith(f"{prefix}.") for other in values):
            parts = parts[:count]
            break
    return ".".join(parts[:-1]), parts[-1]


def save_config(config: DictConfig, directory: Path, overrides: Sequence[str]) -> None:
    """Write configuration and overrides into the .hydra directory atomically; the next resume starts from them."""
    own = [override for override in overrides if override_key(override) != "resume"]
    for name, content in (("config", OmegaConf.to_yaml(config)), ("overrides", OmegaConf.to_yaml(own))):
        write_file(directory / ".hydra" / f"{name}.yaml", content)
