"""Going on with a run: where it is, and its configuration with what was said anew."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from esper.config import CONF

LAST = "last.ckpt"
OUTPUTS = Path("outputs")
KEPT = ("seed", "name")  # a resumed run cannot change them and be the same run


def prepared(arguments: Sequence[str]) -> list[str]:
    """The command line as Hydra should see it.

    `debug=...` comes last, so that it wins over an experiment; a resumed run goes on in its own directory.
    """
    rest = [argument for argument in arguments if not argument.startswith("debug=")]
    debug = [f"+{argument}" for argument in arguments if argument.startswith("debug=")]
    wanted = [argument.partition("=")[2] for argument in rest if argument.startswith("resume=")]
    if not wanted or wanted[-1] in ("null", ""):
        return rest + debug
    if {"-m", "--multirun"} & set(rest):
        raise SystemExit(f"resume={wanted[-1]}: goes on with one run; it cannot be given to a sweep.")
    directory = find(wanted[-1])
    quoted = str(directory).replace("'", "\\'")
    return [*rest, *debug, f"hydra.run.dir='{quoted}'", "hydra.output_subdir=null"]


def find(name: str) -> Path:
    """The directory of the run that is meant."""
    if name != "latest":
        directory = Path(name)
        if not (directory / ".hydra" / "config.yaml").is_file():
            raise SystemExit(f"resume={name}: is no directory of a run; it has no .hydra/config.yaml.")
        return directory
    runs = [path.parent for path in OUTPUTS.glob("**/checkpoints") if (path.parent / ".hydra/config.yaml").is_file()]
    if not runs:
        raise SystemExit(f"resume=latest: there is no run under {OUTPUTS}/ here.")
    return max(runs, key=lambda run: (run / "checkpoints").stat().st_mtime_ns)


def overridden(typed: DictConfig, directory: Path, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """The run's configuration with the overrides that were typed now, and what they change.

    `typed` is the configuration as composed from the command line alone.
    """
    saved = OmegaConf.load(directory / ".hydra" / "config.yaml")
    assert isinstance(saved, DictConfig)
    before = _flat(saved)
    known = directory / ".hydra" / "overrides.yaml"
    earlier = list(OmegaConf.load(known)) if known.is_file() else []
    with open_dict(saved):
        for override in OverridesParser.create().parse_overrides(list(overrides)):
            key = override.key_or_group
            if key == "resume":
                continue
            if key == "experiment":
                if override.input_line not in earlier:
                    raise ValueError(f"{override.input_line}: a resumed run keeps its experiment; leave it out.")
                continue
            if key == "debug":
                raise ValueError(f"{override.input_line}: a resumed run cannot become another one; leave it out.")
            value = OmegaConf.select(typed, key)
            replace = (CONF / key).is_dir()
            OmegaConf.update(saved, key, value, merge=not replace)
        saved.resume = None
    after = _flat(saved)
    for key in KEPT:
        if before[key] != after[key]:
            raise ValueError(f"{key}={after[key]}: a resumed run keeps its {key}={before[key]}.")
    changed = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    return saved, [f"{key}: {before.get(key)} -> {after.get(key)}" for key in changed]


def save_config(config: DictConfig, directory: Path) -> None:
    """So that the next resume knows what was changed by this one."""
    path = directory / ".hydra" / "config.yaml"
    unfinished = path.with_suffix(".part")
    unfinished.write_text(OmegaConf.to_yaml(config))
    os.replace(unfinished, path)


def _flat(config: DictConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            found[prefix] = node

    walk(OmegaConf.to_container(config, resolve=False), "")
    return found
