"""Metadata of a checkpoint: everything besides weights and optimizer state.

Versions 1 and 2 belong to policies with a fixed number of slots, which this esper cannot load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from esper.controllers import METADATA_VERSION, Policy, check_metadata_version
from esper.lifecycle import Layout
from esper.ppo.critic import Critic


@dataclass
class Counters:
    """Progress of a run, summed over all ranks."""

    rounds: int = 0
    episodes: int = 0
    decisions: int = 0
    updates: int = 0  # optimizer steps of the policy
    skipped: int = 0  # minibatches with non-finite values
    bad: int = 0  # consecutive updates with a skipped minibatch


@dataclass(frozen=True)
class TrainingHistory:
    """How a controller was trained; saved in exported controllers, which are used without their run's directory."""

    overrides: Sequence[str]
    config: Mapping[str, Any]
    trained_on: str  # host and data, by the names of their presets
    rounds: Sequence[Mapping[str, Any]]  # lines of rounds.jsonl


@dataclass(frozen=True)
class CheckpointMetadata:
    """The entry `esper` of a checkpoint.

    All randomness of a run is derived from its seed and its counters; the state of torch's global generator is saved
    for user modules that draw from it. The mode of compilation is saved for information only: networks are compiled in
    place, so weights have the same names, and a resumed run compiles by its own configuration.
    """

    layout: Layout
    sizes: Mapping[str, int]  # of the policy
    seed: int  # of the run
    counters: Counters
    compile: str | None = None  # mode of torch.compile
    critic: Mapping[str, Any] | None = None  # sizes and task features of a separate critic; None if it is shared
    start_cost: Mapping[str, float | None] = field(default_factory=dict)  # training cost of the controller in `start`
    generator: Tensor | None = None  # state of torch's global generator
    training: TrainingHistory | None = None
    version: int = METADATA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """As plain data: numbers, strings, lists, dictionaries and tensors."""
        data = {key: value for key, value in vars(self).items() if value is not None}
        data |= {"layout": self.layout.to_dict(), "counters": asdict(self.counters), "sizes": dict(self.sizes)}
        data["start_cost"] = dict(self.start_cost)
        if self.critic is not None:
            data["critic"] = dict(self.critic)
        if self.training is not None:
            data["training"] = dict(vars(self.training))
        return data

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "CheckpointMetadata":
        """Read the entry. The message of a ValueError has no subject, so that callers can name the file."""
        check_metadata_version(saved)
        training = saved.get("training")
        return cls(
            layout=Layout.from_dict(saved["layout"]),
            sizes=saved["sizes"],
            seed=saved["seed"],
            counters=Counters(**saved["counters"]),
            compile=saved.get("compile"),
            critic=saved.get("critic"),
            start_cost=saved.get("start_cost") or {},
            generator=saved.get("generator"),
            training=None if training is None else TrainingHistory(**training),
            version=saved["version"],
        )


def check_fits(saved: CheckpointMetadata, policy: Policy, path: object, critic: Critic | None) -> None:
    """Raise a ValueError that names the size or the part of the layout in which the checkpoint at `path` differs."""
    now, before = ("shared" if sizes is None else "separate" for sizes in (critic, saved.critic))
    if now != before:
        raise ValueError(f"ppo.critic={now}: the checkpoint {path} has {before}.")
    if critic is not None and saved.critic is not None:
        for key, value in critic.sizes.items():
            if saved.critic[key] != value:
                raise ValueError(
                    f"critic, {key}: this run has {value}, but the checkpoint {path} has {saved.critic[key]}."
                )
    for key, size in policy.sizes.items():
        if saved.sizes[key] != size:
            raise ValueError(f"policy.{key}={size}: the checkpoint {path} has {saved.sizes[key]}.")
    saved_layout = saved.layout.to_dict()
    for key, value in policy.layout.to_dict().items():
        if saved_layout[key] != value:
            raise ValueError(f"{key}: this run has {value}, but the checkpoint {path} has {saved_layout[key]}.")
