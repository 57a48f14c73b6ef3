"""The training run of a controller, read from its directory or from an exported controller."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from esper.checkpoints.runs import preset_names, read_overrides, read_yaml
from esper.config import migrate_config
from esper.controllers import PRETRAINED, Policy, acts_greedily, find_checkpoint
from esper.ppo import Counters, read_checkpoint
from esper.ppo.module import UPDATE_PASSES
from esper.records import HELD_OUT, read_rounds
from esper.renames import renamed_override

TIMES = ("time/environment", "time/policy", "time/update")
RUN_IDENTITY = ("decisions", "episode/score", "episode/gflops", "policy/epochs", *TIMES)  # metrics of round 1


@dataclass(frozen=True)
class TrainingOrigin:
    """How a controller was trained."""

    place: Path  # directory of the run, or the exported file
    overrides: Sequence[str]
    config: DictConfig
    trained_on: str  # host and data, by the names of their presets
    rounds: Sequence[Mapping[str, Any]]  # metrics of each round; empty if they were not recorded

    def costs(self, counters: Counters, policy: Policy) -> dict[str, float | None]:
        """GFLOPs of hosts and policy, and seconds, of the whole training; None if rounds were not recorded."""
        lines = self._until(counters.rounds)
        if len(lines) < counters.rounds or not counters.rounds:
            return {"gflops": None, "seconds": None}
        episodes, decisions = counters.episodes / counters.rounds, counters.decisions / counters.rounds
        names = ["episode/gflops", *(f"validation/{kind}_gflops" for kind in HELD_OUT)]  # equal numbers of episodes
        hosts = sum(episodes * (line.get(name) or 0.0) for line in lines for name in names)
        passes = sum(decisions * (1 + UPDATE_PASSES * line["policy/epochs"]) for line in lines)
        seconds = sum(line[name] or 0.0 for line in lines for name in TIMES)
        critic = sum(line.get("policy/critic_gflops") or 0.0 for line in lines)  # of a separate one
        return {"gflops": hosts + passes * policy.flops / 1e9 + critic, "seconds": seconds}

    def greedy(self, rounds: int) -> bool:
        """Whether greedy actions scored higher than sampled ones on the last held-out episodes."""
        return acts_greedily(self._until(rounds))

    @property
    def identity(self) -> str:
        """Equal for all checkpoints of one run: the metrics of its first round."""
        first = {key: self.rounds[0].get(key) for key in RUN_IDENTITY} if self.rounds else str(self.place.resolve())
        return json.dumps(first)

    def _until(self, rounds: int) -> list[Mapping[str, Any]]:
        return [line for line in self.rounds if line["round"] <= rounds]


def checkpoint_label(name: str) -> str:
    """The name of a controller in episode records."""
    return name if name in PRETRAINED else str(find_checkpoint(name).resolve())


def read_origin(checkpoint: Path) -> TrainingOrigin:
    """How a controller was trained; read from the file if it is exported, else from the directory of its run."""
    history = read_checkpoint(checkpoint).metadata.training
    if history is not None:
        config = migrate_config(OmegaConf.create(dict(history.config)))
        overrides = list(map(renamed_override, history.overrides))
        return TrainingOrigin(checkpoint, overrides, config, history.trained_on, history.rounds)
    run = _run_directory(checkpoint)
    config = _run_config(run)
    return TrainingOrigin(run, read_overrides(run), config, preset_names(run), read_rounds(run / "rounds.jsonl"))


def _run_directory(checkpoint: Path) -> Path:
    """The directory with the configuration that a checkpoint was trained with."""
    for directory in (checkpoint.parent.parent, checkpoint.parent):
        if (directory / ".hydra" / "config.yaml").is_file():
            return directory
    raise ValueError(f"ckpt={checkpoint}: its run's configuration (.hydra/config.yaml) is missing.")


def _run_config(run: Path) -> DictConfig:
    config = read_yaml(run / ".hydra" / "config.yaml")
    if not isinstance(config, DictConfig) or "policy" not in config:
        raise ValueError(f"ckpt: {run}/.hydra/config.yaml is not the configuration of a run that trains a policy.")
    return migrate_config(config)
