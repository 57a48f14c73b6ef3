"""Read a trained controller from its file, without Hydra and without the environment that it was trained in."""

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor

from esper.controllers.contract import check_transferable, known_options, map_weights
from esper.controllers.policy import Policy
from esper.lifecycle import Layout

METADATA_VERSION = 3  # written and read; versions 1 and 2 belong to policies with a fixed number of slots
SHIPPED = Path(__file__).parent.parent / "pretrained"
DEFAULT_EXPERIMENT = "cifar_ppo"  # its controllers are named only by their seed
PRETRAINED = {  # controllers shipped with esper, by their name in `ckpt`
    "pretrained": SHIPPED / f"{DEFAULT_EXPERIMENT}_0.pt",
    **{f"pretrained/{path.stem.removeprefix(f'{DEFAULT_EXPERIMENT}_')}": path for path in sorted(SHIPPED.glob("*.pt"))},
}
LAST_CHECKPOINT = "last.ckpt"
POLICY_PREFIX = "policy."  # of names of the policy's weights in a checkpoint
CRITIC_PREFIX = "critic."  # of names of the critic's weights in a policy
HELD_OUT_SCORES = ("validation/greedy_score", "validation/sampled_score")
UNTRAINED = {"compile": None, "floors": None}  # settings that only training needs


@dataclass(frozen=True)
class SavedController:
    """A controller as its file has it."""

    path: Path
    layout: Layout  # what it was trained to see and to choose
    weights: Mapping[str, Tensor]
    settings: Mapping[str, Any]  # arguments of its policy
    actions: Mapping[str, Any] = field(default_factory=dict)  # configuration of its action space
    lifecycle: Mapping[str, Any] = field(default_factory=dict)  # configuration of its rules
    is_greedy: bool = False  # whether it acts best by the most likely options


def read_checkpoint_content(path: Path) -> dict[str, Any]:
    """The content of a checkpoint of esper; no code in the file is executed."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: the checkpoint does not exist.") from None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        raise ValueError(f"{path}: is not a readable checkpoint; it is truncated, or of another program.") from None
    if not isinstance(content, dict) or "esper" not in content:
        raise ValueError(f"{path}: is a checkpoint, but not of esper: it has no entry esper.")
    return content


def check_metadata_version(saved: Mapping[str, Any]) -> None:
    """Refuse another version; the message has no subject, so that callers can name the file."""
    version = saved.get("version", 0)
    if version in (1, 2):
        raise ValueError(
            f"has version {version}, of a policy for a fixed number of slots; this esper reads version "
            f"{METADATA_VERSION}: train the controller again"
        )
    if version != METADATA_VERSION:
        raise ValueError(f"has version {version}; this esper reads version {METADATA_VERSION}")


def find_checkpoint(name: str, key: str = "ckpt") -> Path:
    """The file of a checkpoint, given its path, the directory of its run, or the name of a shipped controller.

    `key` is the configuration key that has the name as its value, for messages.
    """
    if name in PRETRAINED:
        return PRETRAINED[name]
    path = Path(name)
    file = path / "checkpoints" / LAST_CHECKPOINT if path.is_dir() else path
    if not file.is_file():
        reason = f"it has no checkpoints/{LAST_CHECKPOINT}" if path.is_dir() else "there is no such file"
        raise ValueError(f"{key}={name}: must be a checkpoint, the directory of a run, or pretrained; {reason}.")
    return file


def acts_greedily(rounds: Sequence[Mapping[str, Any]]) -> bool:
    """Whether greedy actions scored higher than sampled ones on the last held-out episodes of some rounds.

    A policy for which WAIT is always the most likely op never acts when it is greedy. Without held-out episodes the
    controller samples, as in training.
    """
    scores = [[line.get(name) for name in HELD_OUT_SCORES] for line in rounds]
    known = [(greedy, sampled) for greedy, sampled in scores if greedy is not None and sampled is not None]
    return bool(known) and known[-1][0] >= known[-1][1]


def policy_weights(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the policy in a checkpoint."""
    return {
        key.removeprefix(POLICY_PREFIX): value for key, value in state_dict.items() if key.startswith(POLICY_PREFIX)
    }


def load_policy_weights(policy: Policy, saved: Layout, weights: Mapping[str, Tensor], source: str) -> Policy:
    """Load a trained controller's weights into a policy of another layout, by name, and set what it may choose.

    `source` names the file and its configuration, for messages.
    """
    if not any(key.startswith(CRITIC_PREFIX) for key in weights):
        policy.critic = None  # it was trained with a separate critic, which is not needed for acting
    mapped = map_weights(saved, weights, policy)
    unmapped = [key for key in missing_weights(mapped, policy) if not is_new_weight(key, saved)]
    if unmapped:
        raise ValueError(f"{source}: its weights do not fit the policy in its configuration: {unmapped[0]}.")
    policy.load_state_dict(mapped, strict=False)
    policy.known = known_options(saved, policy.layout)
    return policy.eval()


def missing_weights(weights: Mapping[str, Tensor], policy: Policy) -> list[str]:
    """Names of the policy's weights that are not among `weights` in the right shape."""
    expected = policy.state_dict()
    return [key for key, value in expected.items() if key not in weights or weights[key].shape != value.shape]


def is_new_weight(key: str, saved: Layout) -> bool:
    """Whether a weight belongs to a head, or to the option of all slots, that a checkpoint does not have."""
    if key.startswith("all_slots."):
        return not saved.all_slots
    return key.startswith("heads.") and key.split(".")[1] not in saved.options


def read_controller(name: str) -> SavedController:
    """Read a controller by its path, the directory of its run, or the name of a shipped one."""
    path = find_checkpoint(name, "controller")
    content = read_checkpoint_content(path)
    saved = content["esper"]
    try:
        check_metadata_version(saved)
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from None
    history = saved.get("training")
    config = _run_config(path) if history is None else history["config"]
    return SavedController(
        path=path,
        layout=Layout.from_dict(saved["layout"]),
        weights=policy_weights(content["state_dict"]),
        settings={key: value for key, value in config["policy"].items() if not key.startswith("_")},
        actions=config.get("actions") or {},
        lifecycle=config.get("lifecycle") or {},
        is_greedy=acts_greedily(_run_rounds(path, saved) if history is None else history["rounds"]),
    )


def build_policy(saved: SavedController, layout: Layout) -> Policy:
    """The policy of a controller, for an action space and features of its own kind."""
    source = f"controller={saved.path}"
    check_transferable(saved.layout, layout, source)
    try:
        policy = Policy(layout, **{**saved.settings, **UNTRAINED})
    except TypeError as error:
        raise ValueError(f"{source}: its policy has settings that this esper does not know ({error}).") from None
    return load_policy_weights(policy, saved.layout, saved.weights, source)


def _run_rounds(checkpoint: Path, saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The metrics of a run's rounds until its checkpoint; empty if they were not recorded."""
    file = checkpoint.parent.parent / "rounds.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rounds = [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut the last line
    return [line for line in rounds if line["round"] <= saved["counters"]["rounds"]]


def _run_config(checkpoint: Path) -> Mapping[str, Any]:
    """The configuration that a run's checkpoint was trained with."""
    for directory in (checkpoint.parent.parent, checkpoint.parent):
        file = directory / ".hydra" / "config.yaml"
        if file.is_file():
            config: Mapping[str, Any] = yaml.safe_load(file.read_text())
            if "policy" in config:
                return config
    raise ValueError(f"controller={checkpoint}: its run's configuration (.hydra/config.yaml) is missing.")
