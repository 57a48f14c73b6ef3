"""Load trained controllers from checkpoints, and export them as one small file."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from esper.checkpoints.origin import TrainingOrigin, checkpoint_label, read_origin
from esper.checkpoints.task import LOCAL_KEYS, TASK, task_settings
from esper.command_line import override_key
from esper.config import build, grows_hosts
from esper.controllers import (
    CRITIC_PREFIX,
    POLICY_PREFIX,
    Policy,
    check_transferable,
    contract_differences,
    find_checkpoint,
    is_new_weight,
    load_policy_weights,
    map_weights,
    missing_weights,
    policy_weights,
)
from esper.lifecycle import Layout
from esper.ppo import AtomicCheckpointIO, CheckpointMetadata, TrainingHistory, read_checkpoint

TRAINING_KEYS = ("name", "policy", "ppo", "collector", "seed", "rounds", "start")  # exported besides the task


@dataclass(frozen=True)
class TrainingInfo:
    """How a controller was trained and what that cost, including the controller in `start`."""

    weights: str  # digest of the policy's weights
    seed: int  # of the run
    rounds: int
    episodes: int
    decisions: int
    gflops: float | None  # None if the rounds were not recorded
    seconds: float | None
    greedy: bool  # whether greedy actions scored higher than sampled ones on held-out episodes
    trained_on: str
    command: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TrainedController:
    """A trained controller and what is known of its training."""

    label: str  # name in episode records: the path of the checkpoint, or pretrained/...
    policy: Policy
    differences: Sequence[str]  # what it does not know of this task, or knows that the task does not have
    weights_digest: str
    training_digest: str  # of task and settings; controllers with equal digests differ only in their seed
    task: Mapping[str, Any]  # flat settings of the task that it was trained on
    info: TrainingInfo


def load_controller(name: str, layout: Layout) -> TrainedController:
    """A trained controller for environments of this layout; refused if it cannot act in them."""
    path = find_checkpoint(name)
    origin, checkpoint = read_origin(path), read_checkpoint(path)
    metadata = checkpoint.metadata
    check_transferable(metadata.layout, layout, f"ckpt={path}")
    policy: Policy = build(origin.config.policy, layout=layout, _partial_=False, compile=None)
    weights = policy_weights(checkpoint.state_dict)
    load_policy_weights(policy, metadata.layout, weights, f"ckpt={path}")
    info = TrainingInfo(
        weights=_digest(weights),
        seed=metadata.seed,
        **_total_cost(origin, metadata, policy),
        greedy=origin.greedy(metadata.counters.rounds),
        trained_on=origin.trained_on,
        command=f"python -m esper.run {shlex.join(origin.overrides)}",
    )
    task = {**task_settings(origin.config), "slots.blueprints": list(metadata.layout.blueprints)}
    digest = _training_digest(task, origin.config)
    differences = contract_differences(metadata.layout, layout)
    return TrainedController(checkpoint_label(name), policy.eval(), differences, info.weights, digest, task, info)


def _training_digest(task: Mapping[str, Any], config: DictConfig) -> str:
    settings = task_settings(config, ("policy", "ppo"))
    if start := config.get("start"):
        settings["start"] = start
    return hashlib.blake2b(json.dumps([task, settings], sort_keys=True).encode(), digest_size=8).hexdigest()


def _total_cost(origin: TrainingOrigin, metadata: CheckpointMetadata, policy: Policy) -> dict[str, Any]:
    """Length and cost of a controller's training, including those of the controller in `start`."""
    counters = metadata.counters
    own: dict[str, float | None] = {
        "rounds": counters.rounds,
        "episodes": counters.episodes,
        "decisions": counters.decisions,
        **origin.costs(counters, policy),
    }
    pairs = {key: (value, metadata.start_cost.get(key, 0)) for key, value in own.items()}
    return {key: None if value is None or start is None else value + start for key, (value, start) in pairs.items()}


def load_start_weights(name: str, policy: Policy) -> dict[str, float | None]:
    """Load a trained controller's weights into a policy, except for the critic, which is specific to its task.

    Returns the length and cost of that controller's training, which are added to those of the new one.
    """
    path = find_checkpoint(name, "start")
    checkpoint = read_checkpoint(path)
    check_transferable(checkpoint.metadata.layout, policy.layout, f"start={name}")
    saved = checkpoint.metadata.layout
    mapped = map_weights(saved, policy_weights(checkpoint.state_dict), policy)
    weights = {key: value for key, value in mapped.items() if not key.startswith(CRITIC_PREFIX)}
    needed = [key for key in missing_weights(mapped, policy) if not key.startswith(CRITIC_PREFIX)]
    unmapped = [key for key in needed if not is_new_weight(key, saved)]
    if unmapped:
        sizes = checkpoint.metadata.sizes
        different = [f"policy.{key}={value}" for key, value in sizes.items() if policy.sizes[key] != value]
        raise ValueError(
            f"start={name}: must have the network of this run, but has {', '.join(different) or unmapped[0]}."
        )
    policy.load_state_dict(weights, strict=False)
    return _total_cost(read_origin(path), checkpoint.metadata, policy)


def load_controllers(names: Sequence[str], layout: Layout) -> list[TrainedController]:
    """Several trained controllers, each from another run: each counts as one repetition."""
    runs: dict[str, str] = {}
    for name in names:
        run = read_origin(find_checkpoint(name)).identity
        if run in runs:
            raise ValueError(f"ckpt: {runs[run]} and {name} are of the same run; each must come from another run.")
        runs[run] = name
    return [load_controller(name, layout) for name in names]


def save_controller(name: str, path: Path) -> int:
    """Export a trained controller as one file that needs no run directory; returns its size in bytes.

    The file has the policy's weights and statistics, how it was trained, and the metrics of its rounds, but no
    optimizer state: it can be evaluated and be the `start` of another run, but a run cannot be resumed from it.
    """
    if path.exists():
        raise ValueError(f"{path}: exists already.")
    source = find_checkpoint(name)
    origin, checkpoint = read_origin(source), read_checkpoint(source)
    if not grows_hosts(origin.config):
        raise ValueError(f"{name}: was trained on {origin.config.environment._target_}, which grows no hosts.")
    saved = checkpoint.metadata
    metadata = CheckpointMetadata(
        layout=saved.layout,
        sizes=saved.sizes,
        seed=saved.seed,
        counters=saved.counters,
        start_cost=saved.start_cost,
        training=TrainingHistory(
            overrides=[override for override in origin.overrides if override_key(override) not in LOCAL_KEYS],
            config=_portable_config(origin.config, saved.layout),
            trained_on=origin.trained_on,
            rounds=list(origin.rounds),
        ),
    )
    weights = {f"{POLICY_PREFIX}{key}": value.clone() for key, value in policy_weights(checkpoint.state_dict).items()}
    AtomicCheckpointIO().save_checkpoint({"esper": metadata.to_dict(), "state_dict": weights}, path)
    return path.stat().st_size


def _portable_config(config: DictConfig, layout: Layout) -> dict[str, Any]:
    """The task and the training settings, without keys of the machine and with the resolved list of blueprints."""
    portable = OmegaConf.masked_copy(config, [*TASK, *TRAINING_KEYS])
    for key in LOCAL_KEYS:
        if OmegaConf.select(portable, key) is not None:
            OmegaConf.update(portable, key, None)
    OmegaConf.update(portable, "slots.blueprints", list(layout.blueprints))
    plain = OmegaConf.to_container(portable, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _digest(weights: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
