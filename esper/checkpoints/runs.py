"""The directories of runs, evaluations and sweeps, and what Hydra has written into them."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from esper.renames import renamed_override


def list_runs(directory: Path) -> list[Path]:
    """The directory itself, or, if it is a sweep's, those of its jobs in their order."""
    if not (directory / "multirun.yaml").is_file():
        return [directory]
    found = {path.parent.parent for path in directory.glob("**/.hydra/config.yaml")}
    jobs = [job for job in found if found.isdisjoint(job.parents)]  # what lies in a job is not one
    return sorted(jobs, key=lambda job: (len(str(job)), job)) or [directory]


def read_yaml(path: Path) -> Any:
    """A file of a run's .hydra directory; None if there is none."""
    try:
        return OmegaConf.load(path) if path.is_file() else None
    except (OSError, YAMLError):
        raise ValueError(f"{path}: cannot be read.") from None


def read_overrides(directory: Path) -> list[str]:
    """What a run was started and resumed with."""
    found = read_yaml(directory / ".hydra" / "overrides.yaml")
    plain = OmegaConf.to_container(found, resolve=False) if isinstance(found, ListConfig) else []
    return [renamed_override(str(override)) for override in plain] if isinstance(plain, list) else []


def preset_names(directory: Path) -> str:
    """Host and data that a run had, by the names of their presets."""
    found = read_yaml(directory / ".hydra" / "hydra.yaml")
    choices = (OmegaConf.select(found, "hydra.runtime.choices") if isinstance(found, DictConfig) else None) or {}
    return f"{choices.get('host', 'a host')} on {choices.get('data', 'some data')}"
