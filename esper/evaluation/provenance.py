"""How the episodes of a report were produced: commands, versions, trained controllers, remarks."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from shutil import which
from typing import Any

EVALUATION_FILE = "evaluation.json"
PACKAGES = ("torch", "lightning", "hydra-core", "numpy")  # whose versions are reported
OLD_PROVENANCE_KEYS = {"learners": "checkpoints", "searched": "search_gflops"}  # of files of version 0.1
PROVENANCE_TYPES = {
    "commands": list, "versions": dict, "checkpoints": dict, "remarks": list, "reference": str,
    "search_gflops": float | int, "searches": dict, "oracle": str, "primary": str, "growth_gains": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Provenance:
    """How episodes were produced.

    Arguments:
        commands: that trained the controllers and ran the episodes
        versions: of esper, Python and packages, the machine, and the commit
        checkpoints: by label of a trained controller, how it was trained (`TrainingInfo`) and how it acts ("acts")
        remarks: sentences about lines that cannot be read, transfer, missing episodes
        reference: the arm that the others are compared with; None picks one
        search_gflops: GFLOPs that the schedule search took, for each host; None without a search
        searches: by arm, what a search under a budget has chosen, and its cost (`SearchOutcome`)
        oracle: the arm with the best plan of all searches; None without a search
        primary: the arm whose comparison with the reference was fixed beforehand; None without one
        growth_gains: by task of a distribution, what the best of some growing arms gains over none on other episode
            seeds; empty if it was not measured
    """

    commands: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    checkpoints: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    reference: str | None = None
    search_gflops: float | None = None
    searches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    oracle: str | None = None
    primary: str | None = None
    growth_gains: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Provenance":
        """From plain data, also with the keys of version 0.1; other keys and values of the wrong type are ignored."""
        values = {OLD_PROVENANCE_KEYS.get(key, key): value for key, value in saved.items()}
        return cls(**{key: values[key] for key, kind in PROVENANCE_TYPES.items() if isinstance(values.get(key), kind)})


def read_provenance(directory: Path) -> Provenance:
    """The provenance in a directory's evaluation.json; empty without that file."""
    path = directory / EVALUATION_FILE
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Provenance()
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return Provenance(remarks=[f"{path}: cannot be read; commands and versions of its episodes are unknown."])
    return Provenance.from_dict(saved) if isinstance(saved, dict) else Provenance()


def merge_provenance(sources: Sequence[Provenance]) -> Provenance:
    """The provenance of several directories as one."""
    references = {source.reference for source in sources if source.reference}
    primaries = {source.primary for source in sources if source.primary}
    oracles = {source.oracle for source in sources}
    return Provenance(
        commands=list(dict.fromkeys(command for source in sources for command in source.commands)),
        versions={name: value for source in reversed(sources) for name, value in source.versions.items()},
        checkpoints={label: info for source in sources for label, info in source.checkpoints.items()},
        remarks=list(dict.fromkeys(remark for source in sources for remark in source.remarks)),
        reference=references.pop() if len(references) == 1 else None,
        search_gflops=max((source.search_gflops for source in sources if source.search_gflops), default=None),
        searches=_merge_searches([source.searches for source in sources]),
        oracle=oracles.pop() if len(oracles) == 1 else None,
        primary=primaries.pop() if len(primaries) == 1 else None,
        growth_gains={task: gain for source in sources for task, gain in source.growth_gains.items()},
    )


def _merge_searches(sources: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Mapping[str, Any]]:
    """The searches of several directories: those that are equal, and those that each task has for itself."""
    merged: dict[str, Mapping[str, Any]] = {}
    for arm in dict.fromkeys(arm for source in sources for arm in source):
        own = [source[arm] for source in sources if arm in source]
        if all("tasks" in each for each in own):
            merged[arm] = {"tasks": {task: part for each in own for task, part in each["tasks"].items()}}
        elif all(each == own[0] for each in own):
            merged[arm] = own[0]
    return merged


def describe_length(environment: Mapping[str, Any]) -> str:
    """The steps of an episode, and its batches or its budget."""
    steps, batch = environment.get("steps"), environment.get("batch")
    if environment.get("batches") is not None:
        return f"{steps} steps of {environment['batches']} batches of {batch}"
    gflops, batches = environment.get("budget"), environment.get("budget_batches")
    budget = f"{batches:g} batches of the bare host" if gflops is None and batches else f"{gflops} GFLOPs"
    return f"{steps} steps with a budget of {budget} in batches of {batch}"


def current_versions(device_name: str) -> dict[str, str]:
    """Versions of esper, Python and packages, the machine, and the commit if it is known."""
    commit = _describe_commit()
    return {
        "esper": version("esper"),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, device {device_name}",
        **({"commit": commit} if commit else {}),
    }


def _describe_commit() -> str | None:
    """The project's commit, and whether files have changed since; None if it is unknown."""
    project = Path(__file__).parent.parent.parent
    if not (project / ".git").exists() or which("git") is None:
        return None
    commands = [
        ["git", "-C", str(project), *rest] for rest in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
    ]
    name, changes = (subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in commands)
    return f"{name}, with changes" if changes else name or None
