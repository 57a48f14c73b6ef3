"""Trained controllers: their checkpoints, the configurations beside these, and the policies inside."""

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from esper.config import build, compose_config
from esper.controllers import Policy
from esper.lifecycle import Layout
from esper.ppo import LAST, read_checkpoint
from esper.records import read
from esper.resume import flat, key_of, overrides_of

TASK = ("host", "data", "slots", "actions", "lifecycle", "environment", "optimizer", "governor", "reward", "gamma")
ELSEWHERE = ("environment.envs", "environment.threads", "data.root", "data.device")  # change nothing in an episode
BACKWARD = 3  # an update's pass forward and back, in passes forward


@dataclass(frozen=True)
class Learner:
    """A trained controller."""

    label: str  # by which episodes name it: where its checkpoint is
    policy: Policy
    weights: str  # a digest of them
    task: Mapping[str, Any]  # what it learned on, every key with its value
    about: Mapping[str, Any]  # plain data: how it was trained


def locate(name: str) -> Path:
    """The checkpoint that is meant by its own path or by its run's directory."""
    path = Path(name)
    found = path / "checkpoints" / LAST if path.is_dir() else path
    if not found.is_file():
        wanted = f"it has no checkpoints/{LAST}" if path.is_dir() else "there is no such file"
        raise ValueError(f"ckpt={name}: must be a checkpoint or the directory of a run; {wanted}.")
    return found


def run_of(checkpoint: Path) -> Path:
    """The directory with the configuration that a checkpoint was trained with."""
    for directory in (checkpoint.parent.parent, checkpoint.parent):
        if (directory / ".hydra" / "config.yaml").is_file():
            return directory
    raise ValueError(f"ckpt={checkpoint}: there is no configuration beside it (.hydra/config.yaml of its run).")


def config_of(run: Path) -> DictConfig:
    config = OmegaConf.load(run / ".hydra" / "config.yaml")
    if not isinstance(config, DictConfig) or "policy" not in config:
        raise ValueError(f"ckpt: {run}/.hydra/config.yaml is no configuration of a run that trained a policy.")
    return config


def named(value: object) -> list[str]:
    """The checkpoints that the key `ckpt` names: none, one or several."""
    if value is None:
        return []
    return [str(name) for name in value] if isinstance(value, Sequence) and not isinstance(value, str) else [str(value)]


def beside(arguments: Sequence[str]) -> list[str]:
    """A command line whose task, unless an experiment is typed, is that of the first checkpoint it names."""
    given = [argument for argument in arguments if key_of(argument) == "ckpt"]
    if not given or {"experiment", "resume"} & set(map(key_of, arguments)):
        return list(arguments)
    names = _typed(given[-1])
    if names is None:
        return list(arguments)  # Hydra will say what is wrong with it
    anew = {key_of(argument) for argument in arguments}
    own = [o for o in task_overrides(names) if not {key_of(o), key_of(o).split(".")[0]} & anew]
    return [*own, *arguments]


def absolute(arguments: Sequence[str]) -> list[str]:
    """A command line that names the same checkpoints from any directory."""
    return [_absolute(argument) if key_of(argument) == "ckpt" else argument for argument in arguments]


def _absolute(argument: str) -> str:
    names = _typed(argument)
    if names is None or not all(Path(name).exists() for name in names):
        return argument  # what is wrong with it is said elsewhere
    quoted = [str(Path(name).resolve()).replace("'", "\\'") for name in names]
    inside = ",".join(f"'{name}'" for name in quoted)
    return f"ckpt=[{inside}]"


def _typed(argument: str) -> list[str] | None:
    """The checkpoints that an argument names; None if Hydra would not understand it."""
    try:
        return named(OverridesParser.create().parse_override(argument).value())
    except OverrideParseException:
        return None


def task_overrides(names: Sequence[str]) -> list[str]:
    """The overrides of the first checkpoint's run that say what it was trained on."""
    if not names:
        return []
    overrides = overrides_of(run_of(locate(names[0])))
    return [override for override in overrides if key_of(override).split(".")[0] in (*TASK, "experiment")]


def as_trained(typed: DictConfig, overrides: Sequence[str], names: Sequence[str]) -> DictConfig:
    """`typed`, with the first checkpoint's own values where presets have changed since it was trained.

    `overrides` are all that `typed` was composed from.
    """
    own = task_overrides(names)
    experiments = [[o for o in some if key_of(o) == "experiment"] for some in (own, overrides)]
    if not names or experiments[0] != experiments[1]:  # another task was typed
        return typed
    anew = {key_of(override) for override in overrides if override not in own}
    saved, before, now = flat(config_of(run_of(locate(names[0])))), flat(compose_config("evaluate", own)), flat(typed)
    for key, value in saved.items():
        group = key.split(".")[0]
        if group in TASK and group not in anew and key in now and now[key] == before.get(key) != value:
            OmegaConf.update(typed, key, value)
    return typed


def load_learner(name: str, layout: Layout) -> Learner:
    """A trained controller for environments of this layout; refused by the key that does not fit."""
    path = locate(name)
    run = run_of(path)
    config, found = config_of(run), read_checkpoint(path)
    transferable(found["esper"]["layout"], layout, path)
    policy: Policy = build(config.policy, layout=layout, _partial_=False, compile=None)
    prefix = "policy."
    weights = {key.removeprefix(prefix): value for key, value in found["state_dict"].items() if key.startswith(prefix)}
    try:
        policy.load_state_dict(weights)
    except RuntimeError:
        raise ValueError(f"ckpt={path}: its weights do not fit the policy of {run}/.hydra/config.yaml.") from None
    about = {
        "weights": _digest(weights),
        "seed": found["esper"]["seed"],
        **{key: found["esper"]["counters"][key] for key in ("rounds", "episodes", "decisions")},
        **_costs(run, found["esper"]["counters"], policy),
        "greedy": _greedy(run, found["esper"]["counters"]["rounds"]),
        "trained_on": _task(run),
        "command": f"python -m esper.run {shlex.join(overrides_of(run))}",
    }
    return Learner(str(path.resolve()), policy.eval(), _digest(weights), task_of(config), about)


def task_of(config: DictConfig) -> dict[str, Any]:
    """What makes a task of a configuration, every key with its value; not how many play at once, or where."""
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    shown = flat(OmegaConf.create({group: found[group] for group in TASK if group in found}))
    return {key: value for key, value in shown.items() if key not in ELSEWHERE}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys of two tasks that are not alike, in words."""
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    return [f"{key}: {then.get(key)} -> {now.get(key)}" for key in keys]


def load_learners(names: Sequence[str], layout: Layout) -> list[Learner]:
    """Several trained controllers; each must come from a run of its own, or they would count for more than they are."""
    found: dict[Path, str] = {}
    for name in names:
        run = run_of(locate(name)).resolve()
        if run in found:
            raise ValueError(f"ckpt: {found[run]} and {name} are of one run; each must be a controller of its own.")
        found[run] = name
    return [load_learner(name, layout) for name in names]


def _digest(weights: Mapping[str, Tensor]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def transferable(saved: Mapping[str, Any], here: Layout, path: Path) -> None:
    """Refuse a policy that cannot act here. Slots may have other names, but must be as many; all else must be equal."""
    mine = here.plain()
    if len(saved["slots"]) != len(mine["slots"]):
        raise ValueError(
            f"ckpt={path}: was trained with the {len(saved['slots'])} slots {', '.join(saved['slots'])}, but here are "
            f"the {len(mine['slots'])} slots {', '.join(mine['slots'])}; slots.names can choose as many."
        )
    for head in {**saved["options"], **mine["options"]}:
        then, now = saved["options"].get(head, []), mine["options"].get(head, [])
        if head != "slot" and then != now:
            raise ValueError(
                f"ckpt={path}: was trained with {head} of {', '.join(then) or 'no choice'}, but here it is of "
                f"{', '.join(now) or 'no choice'}; actions and slots.blueprints must be those it was trained with."
            )
    for key in ("base", "slot", "blueprints", "users"):
        if saved[key] != mine[key]:
            raise ValueError(f"ckpt={path}: was trained with {key} {saved[key]}, but here they are {mine[key]}.")


def _costs(run: Path, counters: Mapping[str, int], policy: Policy) -> dict[str, float | None]:
    """What training has cost so far: GFLOPs of hosts and policy, and seconds; None if its rounds were not recorded."""
    path, rounds = run / "rounds.jsonl", counters["rounds"]
    lines = [line for line in read(path) if line["round"] <= rounds] if path.is_file() else []
    if len(lines) < rounds or not rounds:
        return {"gflops": None, "seconds": None}
    episodes, decisions = counters["episodes"] / rounds, counters["decisions"] / rounds
    hosts = sum(episodes * line["episode/gflops"] for line in lines)
    passes = sum(decisions * (1 + BACKWARD * line["policy/epochs"]) for line in lines)
    names = ("time/environment", "time/policy", "time/update")
    seconds = sum(line[name] or 0.0 for line in lines for name in names)
    return {"gflops": hosts + passes * policy.flops / 1e9, "seconds": seconds}


def _greedy(run: Path, rounds: int) -> bool:
    """Whether its likeliest actions did better than drawn ones when it last played held-out episodes.

    A policy that need not hurry may wait a little likelier than act, and so, taken at its likeliest, wait for ever.
    Without such episodes it is taken as it learned: drawn from.
    """
    path = run / "rounds.jsonl"
    lines = [line for line in read(path) if line["round"] <= rounds] if path.is_file() else []
    scores = [[line.get(f"validation/{kind}_score") for kind in ("greedy", "sampled")] for line in lines]
    known = [(greedy, sampled) for greedy, sampled in scores if greedy is not None and sampled is not None]
    return bool(known) and known[-1][0] >= known[-1][1]


def _task(run: Path) -> str:
    """Host and data that a run had, by the names of their presets."""
    path = run / ".hydra" / "hydra.yaml"
    choices = OmegaConf.select(OmegaConf.load(path), "hydra.runtime.choices") if path.is_file() else None
    return f"{choices['host']} on {choices['data']}" if choices else "unknown"
