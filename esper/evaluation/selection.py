"""Which arms an evaluation runs, and whether they can be compared."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from esper.checkpoints import checkpoint_names, find_checkpoint
from esper.config import grows_hosts
from esper.evaluation.arms import ARMS, DEFAULT_ARMS, get_arm
from esper.records import EpisodeRecord, read_lines


def selected_arms(config: DictConfig) -> list[str]:
    """The requested arms, and the reference if it is named or another arm is derived from it."""
    has_checkpoint, known = bool(checkpoint_names(config.ckpt)), dict.fromkeys([*ARMS, *config.controller])
    requested = config.controllers
    if requested is None:
        arms = [*DEFAULT_ARMS, "ppo"] if has_checkpoint else list(DEFAULT_ARMS)
    elif requested == "all":
        arms = [name for name, arm in ARMS.items() if has_checkpoint or arm.needs != "ckpt"]
    else:
        arms = list(dict.fromkeys([requested] if isinstance(requested, str) else requested))
    for name in arms:
        if name not in known:
            raise ValueError(f"controllers: {name} is unknown; must be of {', '.join(known)}, or all for every arm.")
    derived = [
        name for name in arms if get_arm(name).needs == "reference" and not (name == "replay" and config.replay.records)
    ]
    if (derived or config.reference) and reference_arm(config) not in arms:
        arms.append(reference_arm(config))
    return arms


def reference_arm(config: DictConfig) -> str:
    return str(config.reference or ("ppo" if checkpoint_names(config.ckpt) else "schedule"))


def check_arms(config: DictConfig) -> None:
    """Refuse arms that cannot run, before anything is built."""
    if not grows_hosts(config):
        raise ValueError(f"environment={config.environment._target_}: must be one that grows hosts.")
    if config.controllers is not None and not config.controllers:
        raise ValueError(f"controllers=[]: must name at least one of {', '.join(ARMS)}, or be null or all.")
    reference = reference_arm(config)
    allowed = [name for name in dict.fromkeys([*ARMS, *config.controller]) if get_arm(name).needs != "reference"]
    if reference not in allowed:
        raise ValueError(f"reference={reference}: must be one of {', '.join(allowed)}.")
    arms = selected_arms(config)
    others = [name for name in arms if name != reference]
    if config.primary is not None and config.primary not in others:
        raise ValueError(f"primary={config.primary}: must be null or one of {', '.join(others)}.")
    for name in arms:
        if get_arm(name).needs == "ckpt" and not checkpoint_names(config.ckpt):
            value = "null" if config.ckpt is None else config.ckpt
            raise ValueError(f"ckpt={value}: must name a checkpoint or a run's directory for the arm {name}.")
        needs_two = name == "ppo_permuted" or (name == "replay" and not config.replay.records)
        if config.episodes < 2 and needs_two:
            raise ValueError(f"episodes={config.episodes}: must be at least 2 for the arm {name}.")
    if "ppo_permuted" in arms and config.environment.envs < 2:
        raise ValueError(f"environment.envs={config.environment.envs}: must be at least 2 for the arm ppo_permuted.")
    if "best_open_loop" in arms and not checkpoint_names(config.ckpt) and config.schedules is None:
        raise ValueError("schedules=null: must be a number for the arm best_open_loop without a ckpt.")
    if "replay" in arms and config.replay.records:
        load_recorded_actions(config)
    for name in checkpoint_names(config.ckpt):
        find_checkpoint(name)
    check_export(config, arms)


def check_export(config: DictConfig, arms: Sequence[str]) -> None:
    selector = config.export
    if not (selector is None or selector in ("best", *arms) or isinstance(selector, int)):
        raise ValueError(
            f"export={selector}: must be best, an arm of this evaluation ({', '.join(arms)}), or the number of a line."
        )


def load_recorded_actions(config: DictConfig) -> list[dict[str, str]]:
    """The actions of the episode that `replay` repeats."""
    path, line = config.replay.records, config.replay.line
    lines = list(read_lines(Path(path)))
    if not lines:
        raise ValueError(f"replay.records={path}: has no episodes.")
    if not 0 <= line < len(lines):
        raise ValueError(f"replay.line={line}: must be between 0 and {len(lines) - 1}.")
    try:
        episode = EpisodeRecord.from_dict(lines[line])
    except ValueError as error:
        raise ValueError(f"replay.records={path}: line {line} {error}.") from None
    return [step.action for step in episode.steps]
