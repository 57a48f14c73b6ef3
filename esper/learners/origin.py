"""Where a trained controller came from: its run's directory, or, where it was kept as one file, that file itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from esper.controllers import Policy
from esper.ppo import LAST, read_checkpoint
from esper.records import HELD_OUT, read_rounds
from esper.resume import overrides_of, presets, read_yaml

SHIPPED = Path(__file__).parent.parent / "pretrained"
FOREMOST = "cifar_ppo"  # the experiment whose controllers go by their seeds alone
PRETRAINED = {  # the controllers that come with esper, by the names that ckpt has for them
    "pretrained": SHIPPED / f"{FOREMOST}_0.pt",
    **{f"pretrained/{path.stem.removeprefix(f'{FOREMOST}_')}": path for path in sorted(SHIPPED.glob("*.pt"))},
}
BACKWARD = 3  # an update's pass forward and back, in passes forward
TIMES = ("time/environment", "time/policy", "time/update")
SCORES = tuple(f"validation/{kind}_score" for kind in HELD_OUT)
FIRST = ("decisions", "episode/score", "episode/gflops", "policy/epochs", *TIMES)  # figures of a run's first round


@dataclass(frozen=True)
class Origin:
    """How a controller was trained."""

    place: Path  # its run's directory, or its file
    overrides: Sequence[str]
    config: DictConfig
    trained_on: str  # host and data, by the names of their presets
    rounds: Sequence[Mapping[str, Any]]  # figures of each; empty if they were not recorded

    def costs(self, counters: Mapping[str, int], policy: Policy) -> dict[str, float | None]:
        """What training has cost: GFLOPs of hosts and policy, and seconds; None if its rounds were not recorded."""
        rounds = counters["rounds"]
        lines = self._until(rounds)
        if len(lines) < rounds or not rounds:
            return {"gflops": None, "seconds": None}
        episodes, decisions = counters["episodes"] / rounds, counters["decisions"] / rounds
        played = ["episode/gflops", *(f"validation/{kind}_gflops" for kind in HELD_OUT)]  # as many episodes of each
        hosts = sum(episodes * (line.get(name) or 0.0) for line in lines for name in played)
        passes = sum(decisions * (1 + BACKWARD * line["policy/epochs"]) for line in lines)
        seconds = sum(line[name] or 0.0 for line in lines for name in TIMES)
        return {"gflops": hosts + passes * policy.flops / 1e9, "seconds": seconds}

    def greedy(self, rounds: int) -> bool:
        """Whether its likeliest actions did better than drawn ones when it last played held-out episodes.

        A policy that need not hurry may wait a little likelier than act, and so, taken at its likeliest, wait for ever.
        Without such episodes it is taken as it learned: drawn from.
        """
        scores = [[line.get(name) for name in SCORES] for line in self._until(rounds)]
        known = [(greedy, sampled) for greedy, sampled in scores if greedy is not None and sampled is not None]
        return bool(known) and known[-1][0] >= known[-1][1]

    @property
    def identity(self) -> str:
        """Tells its run from all others, whatever file of it this is: by what its first round came to, and took."""
        first = {key: self.rounds[0].get(key) for key in FIRST} if self.rounds else str(self.place.resolve())
        return json.dumps(first)

    def _until(self, rounds: int) -> list[Mapping[str, Any]]:
        return [line for line in self.rounds if line["round"] <= rounds]


def locate(name: str, key: str = "ckpt") -> Path:
    """The checkpoint that is meant by its own path, by its run's directory, or as one that comes with esper.

    `key` is what names it on the command line.
    """
    if name in PRETRAINED:
        return PRETRAINED[name]
    path = Path(name)
    found = path / "checkpoints" / LAST if path.is_dir() else path
    if not found.is_file():
        wanted = f"it has no checkpoints/{LAST}" if path.is_dir() else "there is no such file"
        raise ValueError(f"{key}={name}: must be a checkpoint, the directory of a run, or pretrained; {wanted}.")
    return found


def label_of(name: str) -> str:
    """By which episodes name a controller."""
    return name if name in PRETRAINED else str(locate(name).resolve())


def origin_of(checkpoint: Path) -> Origin:
    """As the file itself says, else as the run says that it lies in."""
    told = read_checkpoint(checkpoint)["esper"].get("origin")
    if told is not None:
        config = OmegaConf.create(told["config"])
        return Origin(checkpoint, told["overrides"], config, told["trained_on"], told["rounds"])
    run = _run_of(checkpoint)
    return Origin(run, overrides_of(run), _config_of(run), presets(run), read_rounds(run / "rounds.jsonl"))


def _run_of(checkpoint: Path) -> Path:
    """The directory with the configuration that a checkpoint was trained with."""
    for directory in (checkpoint.parent.parent, checkpoint.parent):
        if (directory / ".hydra" / "config.yaml").is_file():
            return directory
    raise ValueError(f"ckpt={checkpoint}: there is no configuration beside it (.hydra/config.yaml of its run).")


def _config_of(run: Path) -> DictConfig:
    config = read_yaml(run / ".hydra" / "config.yaml")
    if not isinstance(config, DictConfig) or "policy" not in config:
        raise ValueError(f"ckpt: {run}/.hydra/config.yaml is no configuration of a run that trained a policy.")
    return config
