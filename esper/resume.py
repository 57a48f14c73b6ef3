"""Going on with a run: where it is, and its configuration with what was said anew."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from esper.config import compose_config

OUTPUTS = Path("outputs")
KEPT = ("seed", "name")  # a resumed run cannot change them and be the same run


def prepared(arguments: Sequence[str]) -> list[str]:
    """The command line as Hydra should see it.

    `debug=...` comes last, so that it wins over an experiment. A resumed run goes on in its own directory, with the
    overrides it was started with before those that are typed now.
    """
    rest = [argument for argument in arguments if _key(argument) != "debug"]
    debug = [f"+{argument.lstrip('+')}" for argument in arguments if _key(argument) == "debug"]
    wanted = [argument.partition("=")[2] for argument in rest if _key(argument) == "resume"]
    if not wanted or wanted[-1] in ("null", ""):
        return rest + debug
    if {"-m", "--multirun"} & set(rest):
        raise SystemExit(f"resume={wanted[-1]}: goes on with one run; it cannot be given to a sweep.")
    directory = find(wanted[-1])
    earlier = overrides_of(directory)
    typed = [argument for argument in rest if _key(argument) != "resume"]
    for argument in (*typed, *debug):
        if _key(argument) in ("experiment", "debug") and argument not in earlier:
            raise SystemExit(f"{argument}: a resumed run stays the run it is; leave it out.")
    anew = {_key(argument) for argument in typed}
    kept = [override for override in earlier if _key(override) not in anew]
    quoted = str(directory).replace("'", "\\'")
    return [*kept, *typed, f"resume='{quoted}'", f"hydra.run.dir='{quoted}'", "hydra.output_subdir=null"]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def find(name: str) -> Path:
    """The directory of the run that is meant."""
    if name != "latest":
        directory = Path(name)
        if not _is_run(directory):
            raise SystemExit(f"resume={name}: is no directory of a run; it has no .hydra/config.yaml of one.")
        return directory
    runs = [path.parent for path in OUTPUTS.glob("**/checkpoints") if _is_run(path.parent)]
    if not runs:
        raise SystemExit(f"resume=latest: there is no run under {OUTPUTS}/ here.")
    return max(runs, key=lambda run: (run / "checkpoints").stat().st_mtime_ns)


def _is_run(directory: Path) -> bool:
    path = directory / ".hydra" / "config.yaml"
    return path.is_file() and "rounds" in OmegaConf.load(path)


def overrides_of(directory: Path) -> list[str]:
    """What a run was started and resumed with."""
    path = directory / ".hydra" / "overrides.yaml"
    if not path.is_file():
        return []
    found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return [str(override) for override in found] if isinstance(found, list) else []


def overridden(typed: DictConfig, directory: Path) -> tuple[DictConfig, list[str]]:
    """The run's configuration with what was typed now, and how it differs.

    `typed` is composed from all overrides, earlier and new; what the new ones change in it, they change in the run's.
    """
    saved = OmegaConf.load(directory / ".hydra" / "config.yaml")
    assert isinstance(saved, DictConfig)
    before, after = flat(compose_config("run", overrides_of(directory))), flat(typed)
    after["resume"] = before["resume"] = None
    changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    for key in KEPT:
        if key in changed:
            raise ValueError(f"{key}={after[key]}: a resumed run keeps its {key}={before[key]}.")
    with open_dict(saved):
        for key in (key for key in changed if key not in after):
            parent, leaf = _highest_gone(key, after)
            (OmegaConf.select(saved, parent) if parent else saved).pop(leaf, None)
        for key in (key for key in changed if key in after):
            OmegaConf.update(saved, key, after[key], force_add=True)
        saved.resume = None
    return saved, [f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed]


def _highest_gone(key: str, there: Mapping[str, Any]) -> tuple[str, str]:
    """The parent and name of the highest node above a key of which nothing is left."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count])
        if prefix not in there and not any(other.startswith(f"{prefix}.") for other in there):
            parts = parts[:count]
            break
    return ".".join(parts[:-1]), parts[-1]


def save(config: DictConfig, directory: Path, overrides: Sequence[str]) -> None:
    """So that the next resume knows what was changed by this one."""
    kept = [override for override in overrides if _key(override) != "resume"]
    for name, content in (("config", OmegaConf.to_yaml(config)), ("overrides", OmegaConf.to_yaml(kept))):
        path = directory / ".hydra" / f"{name}.yaml"
        unfinished = path.with_suffix(".part")
        unfinished.write_text(content)
        os.replace(unfinished, path)


def flat(config: DictConfig) -> dict[str, Any]:
    """Every value under its full key, interpolations as they are written."""
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            found[prefix] = node

    walk(OmegaConf.to_container(config, resolve=False), "")
    return found
