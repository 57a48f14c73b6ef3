"""Records of episodes, the lines of `episodes.jsonl`; training and evaluation share one type, reader and writer."""

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
from esper.renames import rename_config

RECORD_VERSION = 3  # written
READABLE = (2, RECORD_VERSION)
HELD_OUT = (
    "greedy",
    "sampled",
)  # kinds of validation episodes of a training run; their episode seeds are never trained on
MEASURED = (
    "train_loss", "train_accuracy", "loss", "accuracy", "score", "gradient_norm", "health", "parameters", "flops",
)  # fmt: skip
MEASURED_BY_SLOT = ("contribution", "progress", "seed_gradient_norm", "seed_health", "isolated_gain")
RENAMED_RECORD_KEYS = {  # keys of version 2
    "controller": "arm", "learner": "checkpoint", "seed": "episode_seed", "origin": "inputs_digest", "rule": "variant",
    "spent": "flops_by_part", "return": "episode_return", "parts": "reward_terms", "promise": "isolated_gain",
}  # fmt: skip
REQUIRED = {  # keys that a record must have, and their types
    "arm": str, "episode_seed": int, "data": str, "slots": list, "fossils": dict, "host_parameters": int,
    "parameters": float, "parameters_peak": float, "parameters_mean": float, "flops": float | int,
    "score": float | int | None,
}  # fmt: skip
SlotValues = list[float | None]  # None is not measured


@dataclass(frozen=True)
class StepEntry:
    """One step of an episode. Lists have an entry for each slot; None is not measured."""

    action: dict[str, str]  # option by head, for the heads that the op uses
    score: float | None  # validation score
    stage: list[str]
    alpha: SlotValues
    blueprint: list[str | None]  # of the slot's seed in this step
    entered: list[list[str]]  # stages that the slot's seed entered in this step
    contribution: SlotValues
    legal: list[str] = field(default_factory=list)  # legal ops
    reward: float | None = None
    reward_terms: dict[str, float | None] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)  # "detector:slot"
    train_loss: float | None = None
    train_accuracy: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    gradient_norm: float | None = None
    health: float | None = None
    parameters: float | None = None
    flops: float | None = None
    progress: SlotValues = field(default_factory=list)
    seed_gradient_norm: SlotValues = field(default_factory=list)
    seed_health: SlotValues = field(default_factory=list)
    isolated_gain: SlotValues = field(default_factory=list)
    rollback: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "StepEntry":
        return cls(**_known_fields(cls, saved))


@dataclass(frozen=True)
class Germination:
    """The germination of one seed in an episode."""

    step: int
    slot: str
    blueprint: str | None


@dataclass(frozen=True)
class EpisodeRecord:
    """One finished episode. A score is None if the network ended with non-finite values."""

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
    score: float | None  # by which arms are compared
    steps: list[StepEntry]
    episode_return: float | None = None
    fossilized: int = 0
    pruned: int = 0
    rollbacks: int = 0
    host: str | None = None
    split: str = "validation"  # or test: the split of `score`
    kind: str | None = None  # training, sampled or greedy; None in evaluation
    round: int | None = None  # of the training run; None in evaluation
    checkpoint: str | None = None  # file of the trained controller that the arm uses
    inputs_digest: str = ""  # of everything that the episode depends on besides its seed and task
    variant: str = ""  # distinguishes arms of the same name: settings, or the arm it is derived from
    validation_score: float | None = None
    selection_score: float | None = None  # on the validation split, for model selection
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
        """As plain data; optional fields with their default value are omitted."""
        data: dict[str, Any] = {"version": RECORD_VERSION}
        for item in fields(self):
            value = getattr(self, item.name)
            default = item.default_factory() if item.default_factory is not MISSING else item.default
            if value != default or type(value) is not type(default):
                data[item.name] = value
        return {**data, "steps": [step.to_dict() for step in self.steps]}

    @classmethod
    def from_dict(cls, saved: object) -> "EpisodeRecord":
        """Read any supported version. The message of a ValueError has no subject, so that callers can name the line."""
        if not isinstance(saved, dict) or not isinstance(saved.get("steps"), list):
            raise ValueError("is not an episode record")
        version = saved.get("version")
        if not isinstance(version, int) or version not in READABLE:
            raise ValueError(f"is an episode record of version {version}; must be {READABLE[0]} or {RECORD_VERSION}")
        values = _rename_keys(saved, version)
        invalid = [key for key, kind in REQUIRED.items() if key not in values or not isinstance(values[key], kind)]
        try:
            steps = [StepEntry.from_dict(_rename_keys(step, version)) for step in saved["steps"]]
        except (TypeError, AttributeError):
            steps = []
        if invalid or not steps:
            names = ", ".join([*invalid, *([] if steps else ["steps"])])
            raise ValueError(f"is an episode record without a valid {names}")
        split = values.get("split", "test" if "test_score" in values else "validation")  # version 2 has no split
        converted = {
            "config": rename_config(values.get("config", {})) if version < RECORD_VERSION else values.get("config", {}),
            "fossils": {slot: (blueprint, blend) for slot, (blueprint, blend) in values["fossils"].items()},
            "split": split,
            "steps": steps,
        }
        return cls(**{**_known_fields(cls, values), **converted})


def _known_fields(kind: type, saved: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in fields(kind)}
    return {key: value for key, value in saved.items() if key in names}


def _rename_keys(saved: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    if version == RECORD_VERSION:
        return saved
    return {RENAMED_RECORD_KEYS.get(key, key): value for key, value in saved.items()}


@dataclass
class EpisodeLog:
    """Collects the steps of one round: N episodes that run in parallel."""

    space: ActionSpace
    rules: Rules
    episode_seeds: list[int]
    steps: list[list[StepEntry]] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = [[] for _ in self.episode_seeds]

    def add(self, action: Tensor, step: GrowthStep) -> None:
        """Add one step of all episodes."""
        legal_ops = legal(step.record.before, self.space, self.rules).op.tolist()
        blueprints = torch.where(
            step.record.during.blueprint < 0, step.record.before.blueprint, step.record.during.blueprint
        )
        for env in range(len(self.episode_seeds)):
            ops = [op.name for op, is_legal in zip(self.space.ops, legal_ops[env], strict=True) if is_legal]
            self.steps[env].append(self._make_entry(env, action.cpu()[env], step, ops, blueprints[env].tolist()))

    def _make_entry(
        self, env: int, action: Tensor, step: GrowthStep, ops: list[str], blueprints: list[int]
    ) -> StepEntry:
        record = step.record
        return StepEntry(
            action=named_action(self.space, action),
            legal=ops,
            reward=to_plain(step.reward[env]),
            reward_terms={name: to_plain(part[env]) for name, part in step.rewarded.parts.items()},
            findings=[
                f"{name}:{slot}"
                for name, findings in step.rewarded.findings.items()
                for slot, is_found in zip(self.space.slots, findings[env].tolist(), strict=True)
                if is_found
            ],
            **{name: to_plain(getattr(record.now, name)[env]) for name in (*MEASURED, *MEASURED_BY_SLOT)},
            stage=[Stage(index).name for index in record.during.stage[env].tolist()],
            alpha=to_plain(record.during.alpha[env]),
            blueprint=[self.space.blueprints[index] if index >= 0 else None for index in blueprints],
            entered=[
                [Stage(index).name for index in stages.nonzero().flatten().tolist()] for stages in record.entered[env]
            ],
            rollback=RollbackReason(int(record.rollback[env])).name if record.rollback[env] else None,
        )


def named_action(space: ActionSpace, action: Tensor) -> dict[str, str]:
    """An action [heads] as option names by head, for the heads that its op uses."""
    op = space.ops[int(action[0])]
    return {
        head.name: head.options[index]
        for head, index in zip(space.heads, action.tolist(), strict=True)
        if op in head.ops
    }


def to_plain(values: Tensor) -> Any:
    """A tensor as a number or a list of numbers; None for non-finite values: not measured."""
    return _number(values.item()) if values.ndim == 0 else [_number(number) for number in values.tolist()]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def make_record(environment: Environment, log: EpisodeLog, env: int, **known: Any) -> EpisodeRecord:
    """The record of one finished episode; `known` are fields that only the caller knows: arm, score, and others."""
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
    """Appends whole JSON lines and flushes them.

    A last line that is incomplete, since an earlier writer was killed, is removed. `fresh` removes all lines.
    """

    def __init__(self, path: Path, fresh: bool = False) -> None:
        if path.exists():
            content = b"" if fresh else path.read_bytes()
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
        self._file = path.open("a", encoding="utf-8")

    def write(self, *lines: Mapping[str, Any]) -> None:
        """Write lines in one call, so that lines that belong together are written together."""
        self._file.write("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path, what: str = "an episode") -> Iterator[dict[str, Any]]:
    """The lines of a JSON Lines file; an incomplete last line is ignored."""
    for number, line in enumerate(_read_text(path).split("\n")[:-1], 1):
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is not {what} record.") from error
        yield content


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's rounds.jsonl; empty if the file does not exist."""
    if not path.is_file():
        return []
    lines = list(read_lines(path, "a round"))
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not isinstance(line.get("round"), int):
            raise ValueError(f"{path}: line {number} is not a round record.")
    return lines


def read_episodes(path: Path) -> tuple[list[EpisodeRecord], list[str]]:
    """The episodes of a file, and a sentence for each line, or range of lines, that cannot be read."""
    episodes: list[EpisodeRecord] = []
    problems: list[tuple[int, str]] = []  # line number, what is wrong
    *lines, rest = _read_text(path).split("\n")
    for number, line in enumerate(lines, 1):
        try:
            episodes.append(EpisodeRecord.from_dict(json.loads(line)))
        except json.JSONDecodeError:
            problems.append((number, "is not JSON"))
        except ValueError as error:
            problems.append((number, str(error)))
    if rest:
        problems.append((len(lines) + 1, "was cut off"))
    messages = [f"{path}: {sentence}" for sentence in _sentences(problems)]
    if problems:
        messages.append(f"{path}: {len(problems)} lines could not be read, {len(episodes)} could.")
    return episodes, messages


def _sentences(problems: Sequence[tuple[int, str]]) -> list[str]:
    """One for each line, or for consecutive lines with the same problem."""
    sentences = []
    for (_, problem), group in groupby(enumerate(problems), lambda item: (item[1][0] - item[0], item[1][1])):
        numbers = [number for _, (number, _) in group]
        if len(numbers) == 1:
            sentences.append(f"line {numbers[0]} {problem}; it is left out.")
        else:
            sentences.append(f"each of lines {numbers[0]} to {numbers[-1]} {problem}; they are left out.")
    return sentences


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")  # bytes that are not text are not JSON either
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}).") from error
