"""The record of one episode, a line of `episodes.jsonl`."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from esper.lifecycle import Stage, choice_name
from esper.renames import rename_config

RECORD_VERSION = 3  # written
READABLE = (2, RECORD_VERSION)
HELD_OUT = ("greedy", "sampled")  # kinds of validation episodes; training never uses their episode seeds
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
    """One step of an episode. Lists have an entry for each slot of the host; None is not measured."""

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
    batches: int | None = None  # training batches
    rollback: str | None = None

    @property
    def choice(self) -> str:
        """The op, followed by `all` if its slot is all of them."""
        return choice_name(self.action["op"], self.action.get("slot"))

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
    slots: list[str]  # that the episode's host has
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
