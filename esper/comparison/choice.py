"""What an evaluation is asked for: which arms, made from what; refused in one sentence where it cannot be done."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from esper.config import grows
from esper.evaluation.arms import ARMS, USUALLY, arm_of
from esper.learners import locate, named
from esper.records import read


def chosen_arms(config: DictConfig) -> list[str]:
    """The arms that are asked for, and the reference if it is named or one of them is made from it."""
    trained, known = bool(named(config.ckpt)), dict.fromkeys([*ARMS, *config.controller])
    asked = config.controllers
    if asked is None:
        arms = [*USUALLY, "ppo"] if trained else list(USUALLY)
    elif asked == "all":
        arms = [name for name, arm in ARMS.items() if trained or arm.after != "ckpt"]
    else:
        arms = list(dict.fromkeys([asked] if isinstance(asked, str) else asked))
    for name in arms:
        if name not in known:
            raise ValueError(f"controllers: {name} is unknown; there are {', '.join(known)}, and all for all of them.")
    needs = [
        name for name in arms if arm_of(name).after == "reference" and not (name == "replay" and config.replay.records)
    ]
    if (needs or config.reference) and reference_of(config) not in arms:
        arms.append(reference_of(config))
    return arms


def reference_of(config: DictConfig) -> str:
    return str(config.reference or ("ppo" if named(config.ckpt) else "schedule"))


def check_arms(config: DictConfig) -> None:
    """Refuse what cannot be compared, before anything is built."""
    if not grows(config):
        raise ValueError(f"environment: {config.environment._target_} grows no hosts; there is nothing to compare.")
    if not isinstance(config.episodes, int) or config.episodes < 1:
        raise ValueError(f"episodes={config.episodes}: must be a whole number of at least 1.")
    if config.controllers is not None and not config.controllers:
        raise ValueError(f"controllers=[]: must name at least one of {', '.join(ARMS)}, or be null or all.")
    reference = reference_of(config)
    allowed = [name for name in dict.fromkeys([*ARMS, *config.controller]) if arm_of(name).after != "reference"]
    if reference not in allowed:
        raise ValueError(f"reference={reference}: must be one of {', '.join(allowed)}.")
    arms = chosen_arms(config)
    for name in arms:
        if arm_of(name).after == "ckpt" and not named(config.ckpt):
            given = "null" if config.ckpt is None else config.ckpt
            raise ValueError(f"ckpt={given}: must name a checkpoint or a run's directory for the arm {name}.")
        needs_two = name == "ppo_permuted" or (name == "replay" and not config.replay.records)
        if config.episodes < 2 and needs_two:
            raise ValueError(f"episodes={config.episodes}: must be at least 2 for the arm {name}.")
    if "ppo_permuted" in arms and config.environment.envs < 2:
        raise ValueError(f"environment.envs={config.environment.envs}: must be at least 2 for the arm ppo_permuted.")
    if "best_open_loop" in arms and not named(config.ckpt) and config.schedules is None:
        raise ValueError("schedules=null: must be a number for best_open_loop, where no ckpt says how many.")
    if config.schedules is not None and (not isinstance(config.schedules, int) or config.schedules < 1):
        raise ValueError(f"schedules={config.schedules}: must be a whole number of at least 1, or null.")
    if "replay" in arms and config.replay.records:
        recorded_actions(config)
    for name in named(config.ckpt):
        locate(name)
    check_export(config, arms)


def check_export(config: DictConfig, arms: Sequence[str]) -> None:
    which = config.export
    if not (which is None or which in ("best", *arms) or (isinstance(which, int) and which >= 0)):
        played = ", ".join(arms)
        raise ValueError(
            f"export={which}: must be best, one of the arms that are played ({played}), or a line's number."
        )


def recorded_actions(config: DictConfig) -> list[dict[str, str]]:
    """The actions of the episode that is to be replayed."""
    path, line = config.replay.records, config.replay.line
    if not isinstance(line, int):
        raise ValueError(f"replay.line={line}: must be a whole number.")
    episodes = list(read(Path(path)))
    if not episodes:
        raise ValueError(f"replay.records={path}: holds no episodes.")
    if not 0 <= line < len(episodes):
        raise ValueError(f"replay.line={line}: must be between 0 and {len(episodes) - 1}.")
    try:
        return [dict(step["action"]) for step in episodes[line]["steps"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"replay.records={path}: line {line} is no episode record.") from None
