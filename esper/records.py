"""Episodes as lines of JSON: one reader and one writer for training and evaluation alike."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from esper.environment import Environment, Reason, Step
from esper.lifecycle import ActionSpace, Blend, Rules, Stage, legal

VERSION = 2
MEASURED = (
    "train_loss", "train_accuracy", "loss", "accuracy", "score", "gradient_norm", "health", "parameters", "flops",
)  # fmt: skip
NEEDED = {  # what an episode is compared by, and of which kind it is
    "controller": str, "seed": int, "data": str, "slots": list, "fossils": dict, "host_parameters": int,
    "parameters": float, "parameters_peak": float, "parameters_mean": float, "flops": float | int,
    "score": float | int | None,
}  # fmt: skip
HELD_OUT = ("greedy", "sampled")  # kinds of episodes that a training run plays on seeds it never learns on
STEP = {"action", "score", "stage", "alpha", "blueprint", "entered", "contribution"}
MEASURED_BY_SLOT = ("contribution", "progress", "seed_gradient_norm", "seed_health", "promise")


@dataclass
class EpisodeLog:
    """Gathers one round: N episodes that run side by side."""

    space: ActionSpace
    rules: Rules
    seeds: list[int]
    steps: list[list[dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = [[] for _ in self.seeds]

    def add(self, action: Tensor, step: Step) -> None:
        """A step of all episodes."""
        may = legal(step.record.before, self.space, self.rules).op.tolist()
        for env in range(len(self.seeds)):
            ops = [op.name for op, there in zip(self.space.ops, may[env], strict=True) if there]
            self.steps[env].append({"legal": ops, **self._one(env, action.cpu()[env], step)})

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
    steps, slots = log.steps[env], environment.view.slots
    count = [stage for step in steps for stages in step["entered"] for stage in stages]
    sizes = [step["parameters"] for step in steps]
    return {
        "version": VERSION,
        **about,
        **({"host": environment.stock.name(log.seeds[env])} if len(environment.stock) > 1 else {}),
        "seed": log.seeds[env],
        "data": environment.data.name,
        "slots": list(environment.space.slots),
        "fossils": {
            name: [environment.space.blueprints[int(blueprint)], Blend(int(blend)).name]
            for name, stage, blueprint, blend in zip(
                environment.space.slots, slots.stage[env], slots.blueprint[env], slots.blend[env], strict=True
            )
            if stage == Stage.FOSSILIZED
        },
        "host_parameters": int(environment.view.host_parameters[env]),
        "parameters_peak": max(sizes),
        "parameters_mean": sum(sizes) / len(sizes),
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

    def write(self, *lines: Mapping[str, Any]) -> None:
        """At one stroke, so that what belongs together is there together."""
        self._file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: Path, what: str = "episode") -> Iterator[dict[str, Any]]:
    """The lines of a file; a last line that was cut off while it was written is left out."""
    for number, line in enumerate(_text(path).split("\n")[:-1], 1):
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is no {what} record.") from error
        yield found


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's rounds.jsonl; none if there is no such file."""
    if not path.is_file():
        return []
    lines = list(read(path, "round"))
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not isinstance(line.get("round"), int):
            raise ValueError(f"{path}: line {number} is no round record.")
    return lines


def salvage(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The episodes of a file that can be read, what is wrong with lines that cannot, and how many these are."""
    episodes: list[dict[str, Any]] = []
    flaws: list[tuple[int, str]] = []
    *lines, rest = _text(path).split("\n")
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            wrong = _flaw(found)
        except json.JSONDecodeError:
            wrong = "is no JSON"
        if wrong is None:
            episodes.append(found)
        else:
            flaws.append((number, wrong))
    if rest:
        flaws.append((len(lines) + 1, "was cut off"))
    complaints = [f"{path}: {sentence}" for sentence in _sentences(flaws)]
    if flaws:
        complaints.append(f"{path}: {len(flaws)} lines could not be read, {len(episodes)} could.")
    return episodes, complaints


def _sentences(flaws: Sequence[tuple[int, str]]) -> list[str]:
    """One for each line, or for lines in a row that have the same flaw."""
    found = []
    for (_, wrong), some in groupby(enumerate(flaws), lambda item: (item[1][0] - item[0], item[1][1])):
        numbers = [number for _, (number, _) in some]
        if len(numbers) == 1:
            found.append(f"line {numbers[0]} {wrong}; it is left out.")
        else:
            found.append(f"each of lines {numbers[0]} to {numbers[-1]} {wrong}; they are left out.")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # what is no text is no JSON either
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error


def _flaw(found: object) -> str | None:
    """Why something is no episode record of this version; None if it is one."""
    if not isinstance(found, dict) or not isinstance(found.get("steps"), list):
        return "is no episode record"
    if found.get("version") != VERSION:
        return f"is an episode record of version {found.get('version')}, not {VERSION}"
    wrong = [key for key, kinds in NEEDED.items() if key not in found or not isinstance(found[key], kinds)]
    steps = [step for step in found["steps"] if isinstance(step, dict) and set(step) >= STEP]
    if not steps or len(steps) < len(found["steps"]):
        wrong.append("steps")
    return f"is an episode record without a proper {', '.join(wrong)}" if wrong else None
