"""Trained controllers: from a checkpoint to a policy that acts, and back into one small file."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from esper.config import build, grows
from esper.controllers import Policy
from esper.learners.origin import Origin, label_of, locate, origin_of
from esper.learners.task import ELSEWHERE, TASK, task_of
from esper.lifecycle import Layout
from esper.ppo import AtomicIO, read_checkpoint
from esper.resume import key_of

PREFIX = "policy."  # of its weights in a checkpoint
CRITIC = "critic."  # of those weights that foretell what its own task paid
WAY = ("name", "policy", "ppo", "collector", "seed", "rounds", "start")  # say how a controller was trained on its task


@dataclass(frozen=True)
class Learner:
    """A trained controller."""

    label: str  # by which episodes name it: where its checkpoint is
    policy: Policy
    weights: str  # a digest of them
    way: str  # a digest of how it was trained; those of one way on one task are repetitions of one another
    task: Mapping[str, Any]  # what it learned on, every key with its value
    about: Mapping[str, Any]  # plain data: how it was trained


def load_learner(name: str, layout: Layout) -> Learner:
    """A trained controller for environments of this layout; refused by the key that does not fit."""
    path = locate(name)
    origin, found = origin_of(path), read_checkpoint(path)
    transferable(found["esper"]["layout"], layout, f"ckpt={path}")
    policy: Policy = build(origin.config.policy, layout=layout, _partial_=False, compile=None)
    weights = _policy(found)
    try:
        policy.load_state_dict(weights)
    except RuntimeError:
        raise ValueError(f"ckpt={path}: its weights do not fit the policy it says it has ({origin.place}).") from None
    counters = found["esper"]["counters"]
    about = {
        "weights": _digest(weights),
        "seed": found["esper"]["seed"],
        **_spent(origin, found["esper"], policy),
        "greedy": origin.greedy(counters["rounds"]),
        "trained_on": origin.trained_on,
        "command": f"python -m esper.run {shlex.join(origin.overrides)}",
    }
    task, way = task_of(origin.config), task_of(origin.config, ("policy", "ppo"))
    if start := origin.config.get("start"):
        way["start"] = start
    told = hashlib.blake2b(json.dumps([task, way], sort_keys=True).encode(), digest_size=8).hexdigest()
    return Learner(label_of(name), policy.eval(), _digest(weights), told, task, about)


def _spent(origin: Origin, told: Mapping[str, Any], policy: Policy) -> dict[str, float | None]:
    """How long a controller was trained and what that cost, with what went into the one it began with."""
    counters, earlier = told["counters"], told.get("earlier") or {}
    own = {**{key: counters[key] for key in ("rounds", "episodes", "decisions")}, **origin.costs(counters, policy)}
    both = {key: (some, earlier.get(key, 0)) for key, some in own.items()}
    return {key: None if some is None or before is None else some + before for key, (some, before) in both.items()}


def begin_with(name: str, policy: Policy) -> dict[str, float | None]:
    """Give a policy what a trained one has learned, but for its critic, which knows what its own task paid.

    Gives what that took, which is part of what the policy will have cost.
    """
    path = locate(name, "start")
    found = read_checkpoint(path)
    transferable(found["esper"]["layout"], policy.layout, f"start={name}")
    weights = {key: value for key, value in _policy(found).items() if not key.startswith(CRITIC)}
    wanted = {key: value for key, value in policy.state_dict().items() if not key.startswith(CRITIC)}
    if any(_shape(weights, key) != _shape(wanted, key) for key in {**weights, **wanted}):
        sizes = found["esper"]["sizes"]
        changed = [f"policy.{key}={value}" for key, value in sizes.items() if policy.sizes[key] != value]
        raise ValueError(f"start={name}: has another network than is asked for; it has {', '.join(changed)}.")
    policy.load_state_dict(weights, strict=False)
    return _spent(origin_of(path), found["esper"], policy)


def _shape(weights: Mapping[str, Tensor], key: str) -> tuple[int, ...] | None:
    return tuple(weights[key].shape) if key in weights else None


def load_learners(names: Sequence[str], layout: Layout) -> list[Learner]:
    """Several trained controllers; each must come from a run of its own, or they would count for more than they are."""
    found: dict[str, str] = {}
    for name in names:
        run = origin_of(locate(name)).identity
        if run in found:
            raise ValueError(f"ckpt: {found[run]} and {name} are of one run; each must be a controller of its own.")
        found[run] = name
    return [load_learner(name, layout) for name in names]


def keep(name: str, path: Path) -> int:
    """Write a trained controller as one file that needs no run beside it; gives its size in bytes.

    It holds the policy's weights and statistics, how it was trained, and the figures of its rounds, but nothing
    of the optimizer: it can be played anywhere, and another run can begin with it, but its own cannot go on.
    """
    if path.exists():
        raise ValueError(f"{path}: exists already.")
    source = locate(name)
    origin, found = origin_of(source), read_checkpoint(source)
    if not grows(origin.config):
        raise ValueError(f"{name}: was trained on {origin.config.environment._target_}, which grows no hosts.")
    told = found["esper"]
    config = OmegaConf.masked_copy(origin.config, [*TASK, *WAY])
    for key in ELSEWHERE:
        if OmegaConf.select(config, key) is not None:
            OmegaConf.update(config, key, None)
    content = {
        "esper": {
            **{key: told[key] for key in ("version", "layout", "sizes", "seed", "counters")},
            "earlier": told.get("earlier") or {},
            "origin": {
                "overrides": [override for override in origin.overrides if key_of(override) not in ELSEWHERE],
                "config": OmegaConf.to_container(config, resolve=False),
                "trained_on": origin.trained_on,
                "rounds": list(origin.rounds),
            },
        },
        "state_dict": {f"{PREFIX}{key}": value.clone() for key, value in _policy(found).items()},
    }
    AtomicIO().save_checkpoint(content, path)
    return path.stat().st_size


def _policy(found: Mapping[str, Any]) -> dict[str, Tensor]:
    every = found["state_dict"]
    return {key.removeprefix(PREFIX): value for key, value in every.items() if key.startswith(PREFIX)}


def _digest(weights: Mapping[str, Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def transferable(saved: Mapping[str, Any], here: Layout, named: str) -> None:
    """Refuse a policy that cannot act here. Slots may have other names, but must be as many; all else must be equal.

    `named` is how it is named on the command line.
    """
    mine = here.plain()
    if len(saved["slots"]) != len(mine["slots"]):
        raise ValueError(
            f"{named}: was trained with the {len(saved['slots'])} slots {', '.join(saved['slots'])}, but here are "
            f"the {len(mine['slots'])} slots {', '.join(mine['slots'])}; slots.names can choose as many."
        )
    for head in {**saved["options"], **mine["options"]}:
        then, now = saved["options"].get(head, []), mine["options"].get(head, [])
        if head != "slot" and then != now:
            raise ValueError(
                f"{named}: was trained with {head} of {', '.join(then) or 'no choice'}, but here it is of "
                f"{', '.join(now) or 'no choice'}; actions and slots.blueprints must be those it was trained with."
            )
    for key in ("base", "slot", "blueprints", "users"):
        if saved[key] != mine[key]:
            raise ValueError(f"{named}: was trained with {key} {saved[key]}, but here they are {mine[key]}.")
