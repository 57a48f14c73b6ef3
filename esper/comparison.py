"""One comparison of arms, as a configuration asks for it."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.progress import Progress

from esper.config import build, build_environment, check, grows
from esper.controllers import Entry, Learned, Schedule, random_entries
from esper.environment import Environment, Start
from esper.evaluation.arms import ARMS, USUALLY, Bench
from esper.evaluation.played import Played
from esper.evaluation.report import Source
from esper.evaluation.runner import Job, play
from esper.growth import export
from esper.learners import Learner, load_learner, locate, named
from esper.records import read
from esper.run import chosen_options
from esper.seeding import derive

PACKAGES = ("torch", "lightning", "hydra-core", "numpy")


def chosen_arms(config: DictConfig) -> list[str]:
    """The arms that are asked for, and the reference if one of them is made from it."""
    trained = config.ckpt is not None
    asked = config.controllers
    if asked is None:
        arms = [*USUALLY, "ppo"] if trained else list(USUALLY)
    elif asked == "all":
        arms = [name for name, arm in ARMS.items() if trained or arm.after != "ckpt"]
    else:
        arms = [asked] if isinstance(asked, str) else list(asked)
    for name in arms:
        if name not in ARMS:
            raise ValueError(f"controllers: {name} is unknown; there are {', '.join(ARMS)}, and all for all of them.")
    needs = [
        name for name in arms if ARMS[name].after == "reference" and not (name == "replay" and config.replay.records)
    ]
    if needs and reference_of(config) not in arms:
        arms.append(reference_of(config))
    return arms


def reference_of(config: DictConfig) -> str:
    return str(config.reference or ("ppo" if config.ckpt is not None else "schedule"))


def check_arms(config: DictConfig) -> None:
    """Refuse what cannot be compared, before anything is built."""
    if not grows(config):
        raise ValueError(f"environment: {config.environment._target_} grows no hosts; there is nothing to compare.")
    if not isinstance(config.episodes, int) or config.episodes < 1:
        raise ValueError(f"episodes={config.episodes}: must be a whole number of at least 1.")
    if config.controllers is not None and not config.controllers:
        raise ValueError(f"controllers=[]: must name at least one of {', '.join(ARMS)}, or be null or all.")
    reference = reference_of(config)
    if reference not in ARMS or ARMS[reference].after == "reference":
        allowed = [name for name, arm in ARMS.items() if arm.after != "reference"]
        raise ValueError(f"reference={reference}: must be one of {', '.join(allowed)}.")
    arms = chosen_arms(config)
    for name in arms:
        if ARMS[name].after == "ckpt" and config.ckpt is None:
            raise ValueError(f"ckpt=null: must name a checkpoint or a run's directory for the arm {name}.")
    if config.episodes < 2:
        for name in arms:
            if name == "ppo_permuted" or (name == "replay" and not config.replay.records):
                raise ValueError(f"episodes={config.episodes}: must be at least 2 for the arm {name}.")
    if "best_open_loop" in arms and config.ckpt is None and config.schedules is None:
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
    episodes = list(read(Path(path)))
    if not episodes:
        raise ValueError(f"replay.records={path}: holds no episodes.")
    if not 0 <= line < len(episodes):
        raise ValueError(f"replay.line={line}: must be between 0 and {len(episodes) - 1}.")
    try:
        return [dict(step["action"]) for step in episodes[line]["steps"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"replay.records={path}: line {line} is no episode record.") from None


class Comparison:
    """One comparison: what it plays, where it writes."""

    def __init__(self, config: DictConfig, directory: Path) -> None:
        check_arms(config)
        check(config)
        self.config, self.directory = config, directory
        self.arms = chosen_arms(config)
        self.environment: Environment = build_environment(config)
        layout = self.environment.layout
        self.learners: list[Learner] = [load_learner(name, layout) for name in named(config.ckpt)]
        self.bench = Bench(
            environment=self.environment,
            seeds=[derive("evaluation", config.seed, index) for index in range(config.episodes)],
            rule=lambda name: build(config.controller[name], space=self.environment.space, _partial_=False),
            learners={learner.label: self._acting(learner) for learner in self.learners},
            repeated=recorded_actions(config) if config.replay.records and "replay" in self.arms else None,
        )
        host = chosen_options().get("host", config.host._target_.rpartition(".")[2])
        self.played = Played(directory / "episodes.jsonl", {"host": host, "config": plain(config)})

    def _acting(self, learner: Learner) -> Learned:
        learned: Learned = build(self.config.controller.ppo, policy=learner.policy, _partial_=False)
        return learned

    def play(self, progress: Progress) -> None:
        """All arms: those that need nothing first, then those that are made from the reference's episodes."""
        free = [name for name in self.arms if ARMS[name].after != "reference" and name != "best_open_loop"]
        self._play(progress, self.played, [job for name in free for job in ARMS[name].jobs(self.bench)], test=True)
        if "best_open_loop" in self.arms:
            self.bench.timetable = self._search(progress)
        seeds = set(self.bench.seeds)
        self.bench.reference = [line for line in self.played.of(reference_of(self.config)) if line["seed"] in seeds]
        rest = [name for name in self.arms if name not in free]
        self._play(progress, self.played, [job for name in rest for job in ARMS[name].jobs(self.bench)], test=True)

    def _search(self, progress: Progress) -> list[Entry]:
        """The best of many random timetables, by what it came to on validation, on a seed of its own."""
        space, steps = self.environment.space, self.environment.steps
        count = self.config.schedules or max(learner.about["episodes"] for learner in self.learners)
        seeds = [derive("timetable", self.config.seed, index) for index in range(count)]
        tried = Played(self.directory / "search.jsonl", {})
        jobs = [
            Job("search", None, (seed,), Schedule(space, random_entries(space, steps, seed)), Start()) for seed in seeds
        ]
        self._play(progress, tried, jobs, test=False)
        lines = [line for line in tried.lines if line["seed"] in set(seeds) and line["selection_score"] is not None]
        best = max(lines, key=lambda line: line["selection_score"])
        return random_entries(space, steps, best["seed"])

    def _play(self, progress: Progress, played: Played, jobs: Sequence[Job], *, test: bool) -> None:
        waiting = sum(len(job.seeds) for job in played.missing(jobs))
        task = progress.add_task("", total=waiting * self.environment.steps)

        def advance(some: Sequence[Job]) -> None:
            names = ", ".join(dict.fromkeys(job.arm for job in some))
            progress.update(task, advance=sum(len(job.seeds) for job in some), description=names)

        played.play(self.environment, jobs, advance, test=test)
        progress.remove_task(task)

    def source(self, commands: Sequence[str]) -> Source:
        """How the episodes came about, for whoever reads them later."""
        trained = dict.fromkeys(str(learner.about["command"]) for learner in self.learners)
        machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, device {self.config.device}"
        return Source(
            commands=[command for command in dict.fromkeys([*trained, *commands]) if command],
            versions={
                "esper": version("esper"),
                "python": platform.python_version(),
                **{name: version(name) for name in PACKAGES},
                "machine": machine,
            },
            learners={learner.label: dict(learner.about) for learner in self.learners},
            remarks=[*self.played.complaints, *self._timetable()],
            reference=reference_of(self.config),
        )

    def _timetable(self) -> list[str]:
        """What the search has found, in words."""
        if "best_open_loop" not in self.arms or not self.played.of("best_open_loop"):
            return []
        entries = sorted(self.bench.timetable, key=lambda entry: entry.at)
        told = "; ".join(f"{e.blueprint[0]} in {e.slot} at step {e.at:.0f}, blended by {e.blend}" for e in entries)
        return [f"best_open_loop found this timetable: {told or 'nothing is grown'}."]

    def export(self, which: str | int) -> Path:
        """Play the episode that is meant once more, and keep the network it ends with."""
        line = self._meant(which)
        jobs = ARMS[line["controller"]].jobs(self.bench)
        key = (line["controller"], line["learner"], line["seed"])
        (job,) = [job for job in jobs if key in job.keys]
        play(self.environment, [job], {}, lambda: None, test=False)
        env, config = job.keys.index(key), self.config
        arguments = {name: value for name, value in plain(config.host).items() if name != "_target_"}
        told = ("controller", "learner", "seed", "score", "test_score", "validation_score", "parameters", "flops")
        path = self.directory / "grown.pt"
        export(
            path,
            self.environment.model(env),
            self.environment.committed(env),
            host={"target": config.host._target_, "arguments": arguments},
            about={
                **{name: line.get(name) for name in told},
                "data": self.environment.data.preparation(),
                "precision": str(config.environment.precision),
            },
        )
        return path

    def _meant(self, which: str | int) -> dict[str, Any]:
        lines, seeds = self.played.lines, set(self.bench.seeds)
        if isinstance(which, int):
            if not 0 <= which < len(lines):
                raise ValueError(f"export={which}: must be between 0 and {len(lines) - 1}.")
            return lines[which]
        mine = [line for line in lines if line["seed"] in seeds and line["controller"] in self.arms]
        chosen = [line for line in mine if which in ("best", line["controller"])]
        return max(chosen, key=lambda line: line["selection_score"] or float("-inf"))


def plain(node: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(node, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
