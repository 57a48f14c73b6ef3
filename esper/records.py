"""Episodes as lines of JSON: one reader and one writer for training and evaluation alike."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from esper.environment import Environment, Reason, Step
from esper.lifecycle import ActionSpace, Stage

VERSION = 1
MEASURED = (
    "train_loss", "train_accuracy", "loss", "accuracy", "score", "gradient_norm", "health", "parameters", "flops",
)  # fmt: skip
MEASURED_BY_SLOT = ("contribution", "progress", "seed_gradient_norm", "seed_health", "promise")


@dataclass
class EpisodeLog:
    """Gathers one round: N episodes that run side by side."""

    space: ActionSpace
    seeds: list[int]
    steps: list[list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = [[] for _ in self.seeds]

    def add(self, action: Tensor, step: Step) -> None:
        """A step of all episodes."""
        for env in range(len(self.seeds)):
            self.steps[env].append(self._one(env, action.cpu()[env], step))

    def _one(self, env: int, action: Tensor, step: Step) -> dict[str, Any]:
        record = step.record
        return {
            "action": named(self.space, action),
            "reward": plain(step.reward[env]),
            "parts": {name: plain(part[env]) for name, part in step.rewarded.parts.items()},
            "findings": [
                f"{name}:{slot}"
                for name, found in step.rewarded.findings.items()
                for slot, there in zip(self.space.slots, found[env].tolist(), strict=True)
                if there
            ],
            **{name: plain(getattr(record.now, name)[env]) for name in MEASURED},
            **{name: plain(getattr(record.now, name)[env]) for name in MEASURED_BY_SLOT},
            "stage": [Stage(index).name for index in record.during.stage[env].tolist()],
            "alpha": plain(record.during.alpha[env]),
            "blueprint": [self.space.blueprints[i] if i >= 0 else None for i in record.during.blueprint[env].tolist()],
            "entered": [
                [Stage(index).name for index in stages.nonzero().flatten().tolist()] for stages in record.entered[env]
            ],
            "rollback": Reason(int(record.rollback[env])).name if record.rollback[env] else None,
        }


def named(space: ActionSpace, action: Tensor) -> dict[str, str]:
    """An action [heads] by the names of its options; only the heads that its op uses."""
    op = space.ops[int(action[0])]
    return {
        head.name: head.options[index]
        for head, index in zip(space.heads, action.tolist(), strict=True)
        if op in head.ops
    }


def plain(values: Tensor) -> Any:
    """Numbers, or lists of them; None is not measured."""
    return _number(values.item()) if values.ndim == 0 else [_number(number) for number in values.tolist()]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def episode(environment: Environment, log: EpisodeLog, env: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """One finished episode as plain data; `about` says whose and of what."""
    steps = log.steps[env]
    count = [stage for step in steps for stages in step["entered"] for stage in stages]
    return {
        "version": VERSION,
        **about,
        "seed": log.seeds[env],
        "data": environment.data.name,
        "slots": list(environment.space.slots),
        "host_parameters": int(environment.view.host_parameters[env]),
        "return": _number(sum(math.nan if step["reward"] is None else step["reward"] for step in steps)),
        "fossilized": count.count(Stage.FOSSILIZED.name),
        "pruned": count.count(Stage.PRUNED.name),
        "rollbacks": sum(step["rollback"] is not None for step in steps),
        "steps": steps,
    }


class Writer:
    """Appends whole lines; what was written stays, whatever happens next.

    A line that was cut off when an earlier writer was killed is removed. `fresh` removes all that was there.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        if path.exists():
            whole = b"" if fresh else path.read_bytes()
            with path.open("r+b") as file:
                file.truncate(whole.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The episodes of a file; a last line that was cut off while it was written is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
    for number, line in enumerate(lines[:-1], 1):
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is no episode record.") from error
        yield found
