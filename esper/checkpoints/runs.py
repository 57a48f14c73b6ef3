"""Directories of runs, evaluations and sweeps, and the files that Hydra writes into them."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from esper.renames import renamed_override


def list_runs(directory: Path) -> list[Path]:
    """The directory itself, or, for the directory of a sweep, those of its jobs in order."""
    if not (directory / "multirun.yaml").is_file():
        return [directory]
    runs = {path.parent.parent for path in directory.glob("**/.hydra/config.yaml")}
    jobs = [run for run in runs if runs.isdisjoint(run.parents)]  # a run inside a job is not a job
    return sorted(jobs, key=lambda job: (len(str(job)), job)) or [directory]


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; None if it does not exist."""
    try:
        return OmegaConf.load(path) if path.is_file() else None
    except (OSError, YAMLError):
        raise ValueError(f"{path}: cannot be read.") from None


def read_overrides(directory: Path) -> list[str]:
    """All overrides that a run was started and resumed with."""
    saved = read_yaml(directory / ".hydra" / "overrides.yaml")
    plain = OmegaConf.to_container(saved, resolve=False) if isinstance(saved, ListConfig) else []
    return [renamed_override(str(override)) for override in plain] if isinstance(plain, list) else []


def preset_names(directory: Path) -> str:
    """Host and data of a run, by the names of their presets."""
    saved = read_yaml(directory / ".hydra" / "hydra.yaml")
    choices = (OmegaConf.select(saved, "hydra.runtime.choices") if isinstance(saved, DictConfig) else None) or {}
    return f"{choices.get('host', 'a host')} on {choices.get('data', 'some data')}"
