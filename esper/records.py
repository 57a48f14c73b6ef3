"""Episodes as lines of JSON: one typed record, one reader and one writer for training and evaluation alike."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.environment import Environment, GrowthStep, RollbackReason
from esper.lifecycle import ActionSpace, Blend, Rules, Stage, legal

VERSION = 3
READABLE = (2, VERSION)
HELD_OUT = ("greedy", "sampled")  # kinds of episodes that a training run has on seeds it never learns from
MEASURED = (
    "train_loss", "train_accuracy", "loss", "accuracy", "score", "gradient_norm", "health", "parameters", "flops",
)  # fmt: skip
MEASURED_BY_SLOT = ("contribution", "progress", "seed_gradient_norm", "seed_health", "isolated_gain")
RENAMED = {  # keys of version 2
    "controller": "arm", "learner": "checkpoint", "seed": "episode_seed", "origin": "inputs_digest", "rule": "variant",
    "spent": "flops_by_part", "return": "episode_return", "parts": "reward_terms", "promise": "isolated_gain",
}  # fmt: skip
CHECKED = {  # types that a record is refused for
    "arm": str, "episode_seed": int, "data": str, "slots": list, "fossils": dict, "host_parameters": int,
    "parameters": float, "parameters_peak": float, "parameters_mean": float, "flops": float | int,
    "score": float | int | None,
}  # fmt: skip
Values = list[float | None]  # by slot; None is not measured


@dataclass(frozen=True)
class StepEntry:
    """One step of an episode. Lists have an entry for each slot; None is not measured."""

    action: dict[str, str]  # options by head, of the heads that the op uses
    score: float | None  # validation
    stage: list[str]
    alpha: Values
    blueprint: list[str | None]  # of the seed that the slot held in this step
    entered: list[list[str]]  # stages that each slot entered
    contribution: Values
    legal: list[str] = field(default_factory=list)  # ops
    reward: float | None = None
    reward_terms: dict[str, float | None] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)  # detector:slot
    train_loss: float | None = None
    train_accuracy: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    gradient_norm: float | None = None
    health: float | None = None
    parameters: float | None = None
    flops: float | None = None
    progress: Values = field(default_factory=list)
    seed_gradient_norm: Values = field(default_factory=list)
    seed_health: Values = field(default_factory=list)
    isolated_gain: Values = field(default_factory=list)
    rollback: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "StepEntry":
        return cls(**_known_fields(cls, saved))


@dataclass(frozen=True)
class Germination:
    """A seed that was planted in an episode."""

    step: int
    slot: str
    blueprint: str | None


@dataclass(frozen=True)
class EpisodeRecord:
    """One finished episode. Scores that are None are those of a network that ended with non-finite values."""

    arm: str
    episode_seed: int
    data: str
    slots: list[str]
    fossils: dict[str, tuple[str, str]]  # slot -> blueprint and blend
    host_parameters: int
    parameters: float  # at the end
    parameters_peak: float
    parameters_mean: float  # over steps
    flops: float
    score: float | None  # what arms are compared by
    steps: list[StepEntry]
    episode_return: float | None = None
    fossilized: int = 0
    pruned: int = 0
    rollbacks: int = 0
    host: str | None = None
    split: str = "validation"  # or test: what `score` was measured on
    kind: str | None = None  # of a training run's episodes: training, sampled or greedy
    round: int | None = None  # of a training run's episodes
    checkpoint: str | None = None  # the trained controller that the arm is, or is derived from
    inputs_digest: str = ""  # of everything the episode depends on besides seed and task
    variant: str = ""  # distinguishes arms of one name: their settings, or the arm they are derived from
    validation_score: float | None = None
    selection_score: float | None = None  # on validation: the one that choices may use
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_score: float | None = None
    flops_by_part: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    embedding_parameters: int | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def growth(self) -> float:
        """Parameters at the end relative to the host's."""
        return self.parameters / self.host_parameters

    @property
    def germinations(self) -> list[Germination]:
        return [
            Germination(index, slot, blueprint)
            for index, step in enumerate(self.steps)
            for slot, blueprint, entered in zip(self.slots, step.blueprint, step.entered, strict=True)
            if Stage.GERMINATED.name in entered
        ]

    def to_dict(self) -> dict[str, Any]:
        """As plain data; optional fields that have their default are left out."""
        found: dict[str, Any] = {"version": VERSION}
        for item in fields(self):
            value = getattr(self, item.name)
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if value != default or type(value) is not type(default):
                found[item.name] = value
        return {**found, "steps": [step.to_dict() for step in self.steps]}

    @classmethod
    def from_dict(cls, saved: object) -> "EpisodeRecord":
        """Refuses what is no record of a readable version in a sentence without a subject: "is no ..."."""
        if not isinstance(saved, dict) or not isinstance(saved.get("steps"), list):
            raise ValueError("is no episode record")
        version = saved.get("version")
        if not isinstance(version, int) or version not in READABLE:
            raise ValueError(f"is an episode record of version {version}, not {VERSION}")
        values = _renamed(saved, version)
        wrong = [key for key, kind in CHECKED.items() if key not in values or not isinstance(values[key], kind)]
        try:
            steps = [StepEntry.from_dict(_renamed(step, version)) for step in saved["steps"]]
        except (TypeError, AttributeError):
            steps = []
        if wrong or not steps:
            raise ValueError(
                f"is an episode record without a proper {', '.join([*wrong, *([] if steps else ['steps'])])}"
            )
        split = values.get("split", "test" if "test_score" in values else "validation")  # older records have no split
        fossils = {slot: (blueprint, blend) for slot, (blueprint, blend) in values["fossils"].items()}
        return cls(**{**_known_fields(cls, values), "fossils": fossils, "steps": steps, "split": split})


def _known_fields(kind: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(kind)}
    return {key: value for key, value in saved.items() if key in names}


def _renamed(saved: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    return saved if version == VERSION else {RENAMED.get(key, key): value for key, value in saved.items()}


@dataclass
class EpisodeLog:
    """Gathers one round: N episodes that run in parallel."""

    space: ActionSpace
    rules: Rules
    episode_seeds: list[int]
    steps: list[list[StepEntry]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = [[] for _ in self.episode_seeds]

    def add(self, action: Tensor, step: GrowthStep) -> None:
        """A step of all episodes."""
        legal_ops = legal(step.record.before, self.space, self.rules).op.tolist()
        held = torch.where(step.record.during.blueprint < 0, step.record.before.blueprint, step.record.during.blueprint)
        for env in range(len(self.episode_seeds)):
            ops = [op.name for op, is_legal in zip(self.space.ops, legal_ops[env], strict=True) if is_legal]
            self.steps[env].append(self._entry(env, action.cpu()[env], step, ops, held[env].tolist()))

    def _entry(self, env: int, action: Tensor, step: GrowthStep, ops: list[str], held: list[int]) -> StepEntry:
        record = step.record
        return StepEntry(
            action=named_action(self.space, action),
            legal=ops,
            reward=to_plain(step.reward[env]),
            reward_terms={name: to_plain(part[env]) for name, part in step.rewarded.parts.items()},
            findings=[
                f"{name}:{slot}"
                for name, found in step.rewarded.findings.items()
                for slot, is_found in zip(self.space.slots, found[env].tolist(), strict=True)
                if is_found
            ],
            **{name: to_plain(getattr(record.now, name)[env]) for name in (*MEASURED, *MEASURED_BY_SLOT)},
            stage=[Stage(index).name for index in record.during.stage[env].tolist()],
            alpha=to_plain(record.during.alpha[env]),
            blueprint=[self.space.blueprints[index] if index >= 0 else None for index in held],
            entered=[
                [Stage(index).name for index in stages.nonzero().flatten().tolist()] for stages in record.entered[env]
            ],
            rollback=RollbackReason(int(record.rollback[env])).name if record.rollback[env] else None,
        )


def named_action(space: ActionSpace, action: Tensor) -> dict[str, str]:
    """An action [heads] by the names of its options; only the heads that its op uses."""
    op = space.ops[int(action[0])]
    return {
        head.name: head.options[index]
        for head, index in zip(space.heads, action.tolist(), strict=True)
        if op in head.ops
    }


def to_plain(values: Tensor) -> Any:
    """Numbers, or lists of them; None is not measured."""
    return _number(values.item()) if values.ndim == 0 else [_number(number) for number in values.tolist()]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def make_record(environment: Environment, log: EpisodeLog, env: int, **known: Any) -> EpisodeRecord:
    """The record of one finished episode; `known` are the fields that its caller knows: arm, score, and more."""
    steps, slots, pool = log.steps[env], environment.view.slots, environment.host_pool
    entered = [stage for step in steps for stages in step.entered for stage in stages]
    sizes = [step.parameters for step in steps if step.parameters is not None]
    if len(pool) > 1:
        known["host"] = pool.host_name(log.episode_seeds[env])
    return EpisodeRecord(
        **known,
        episode_seed=log.episode_seeds[env],
        data=environment.data.name,
        slots=list(environment.space.slots),
        fossils={
            name: (environment.space.blueprints[int(blueprint)], Blend(int(blend)).name)
            for name, stage, blueprint, blend in zip(
                environment.space.slots, slots.stage[env], slots.blueprint[env], slots.blend[env], strict=True
            )
            if stage == Stage.FOSSILIZED
        },
        host_parameters=int(environment.view.host_parameters[env]),
        parameters_peak=max(sizes),
        parameters_mean=sum(sizes) / len(sizes),
        episode_return=_number(sum(math.nan if step.reward is None else step.reward for step in steps)),
        fossilized=entered.count(Stage.FOSSILIZED.name),
        pruned=entered.count(Stage.PRUNED.name),
        rollbacks=sum(step.rollback is not None for step in steps),
        steps=steps,
    )


class LineWriter:
    """Appends whole lines; what was written stays, whatever happens next.

    A line that was cut off when an earlier writer was killed is removed. `fresh` removes all lines.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        if path.exists():
            whole = b"" if fresh else path.read_bytes()
            with path.open("r+b") as file:
                file.truncate(whole.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def write(self, *lines: Mapping[str, Any]) -> None:
        """In one call, so that lines that belong together are written together."""
        self._file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, what: str = "episode") -> Iterator[dict[str, Any]]:
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
    lines = list(read_lines(path, "round"))
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not isinstance(line.get("round"), int):
            raise ValueError(f"{path}: line {number} is no round record.")
    return lines


def read_episodes(path: Path) -> tuple[list[EpisodeRecord], list[str]]:
    """The episodes of a file that can be read, and a sentence for each line, or range of lines, that cannot."""
    episodes: list[EpisodeRecord] = []
    flaws: list[tuple[int, str]] = []
    *lines, rest = _text(path).split("\n")
    for number, line in enumerate(lines, 1):
        try:
            episodes.append(EpisodeRecord.from_dict(json.loads(line)))
        except json.JSONDecodeError:
            flaws.append((number, "is no JSON"))
        except ValueError as error:
            flaws.append((number, str(error)))
    if rest:
        flaws.append((len(lines) + 1, "was cut off"))
    complaints = [f"{path}: {sentence}" for sentence in _sentences(flaws)]
    if flaws:
        complaints.append(f"{path}: {len(flaws)} lines could not be read, {len(episodes)} could.")
    return episodes, complaints


def _sentences(flaws: Sequence[tuple[int, str]]) -> list[str]:
    """One for each line, or for consecutive lines that have the same flaw."""
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
