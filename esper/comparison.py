"""One comparison of arms, as a configuration asks for it."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from shutil import which
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.progress import Progress

from esper.config import build, build_environment, check, grows
from esper.controllers import Entry, Learned, Schedule, random_entries
from esper.environment import Environment, Start
from esper.evaluation.arms import ARMS, USUALLY, Bench
from esper.evaluation.played import Played, key_of
from esper.evaluation.report import Source
from esper.evaluation.runner import Job, play
from esper.growth import export
from esper.learners import Learner, differences, load_learners, locate, named, task_of
from esper.records import read
from esper.run import chosen_options
from esper.seeding import derive

PACKAGES = ("torch", "lightning", "hydra-core", "numpy")


def chosen_arms(config: DictConfig) -> list[str]:
    """The arms that are asked for, and the reference if it is named or one of them is made from it."""
    trained = bool(named(config.ckpt))
    asked = config.controllers
    if asked is None:
        arms = [*USUALLY, "ppo"] if trained else list(USUALLY)
    elif asked == "all":
        arms = [name for name, arm in ARMS.items() if trained or arm.after != "ckpt"]
    else:
        arms = list(dict.fromkeys([asked] if isinstance(asked, str) else asked))
    for name in arms:
        if name not in ARMS:
            raise ValueError(f"controllers: {name} is unknown; there are {', '.join(ARMS)}, and all for all of them.")
    needs = [
        name for name in arms if ARMS[name].after == "reference" and not (name == "replay" and config.replay.records)
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
    if reference not in ARMS or ARMS[reference].after == "reference":
        allowed = [name for name, arm in ARMS.items() if arm.after != "reference"]
        raise ValueError(f"reference={reference}: must be one of {', '.join(allowed)}.")
    arms = chosen_arms(config)
    for name in arms:
        if ARMS[name].after == "ckpt" and not named(config.ckpt):
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


class Comparison:
    """One comparison: what it plays, where it writes."""

    def __init__(self, config: DictConfig, directory: Path) -> None:
        check_arms(config)
        check(config)
        self.config, self.directory = config, directory
        self.arms = chosen_arms(config)
        self.environment: Environment = build_environment(config)
        self.learners: list[Learner] = load_learners(named(config.ckpt), self.environment.layout)
        self.bench = Bench(
            environment=self.environment,
            seeds=[derive("evaluation", config.seed, index) for index in range(config.episodes)],
            rule=lambda name: build(config.controller[name], space=self.environment.space, _partial_=False),
            settings=lambda name: plain(config.controller[name]),
            learners={learner.label: self._acting(learner) for learner in self.learners},
            weights={learner.label: f"{learner.weights}, {self.mode(learner)}" for learner in self.learners},
            repeated=recorded_actions(config) if config.replay.records and "replay" in self.arms else None,
        )
        host = chosen_options().get("host", config.host._target_.rpartition(".")[2])
        self.played = Played(directory / "episodes.jsonl", {"host": host, "config": plain(config)})
        if isinstance(config.export, int) and config.export >= max(self.expected, len(self.played.all)):
            raise ValueError(f"export={config.export}: must be below the {self.expected} episodes that are played.")

    @property
    def expected(self) -> int:
        """How many episodes there are in the end."""
        reference = ARMS[reference_of(self.config)].after
        after = {name: ARMS[name].after for name in self.arms if name != "replay" or self.bench.repeated is None}
        by_learner = [name for name, what in after.items() if (reference if what == "reference" else what) == "ckpt"]
        alone = len(self.arms) - len(by_learner)
        return len(self.bench.seeds) * (alone + len(by_learner) * len(self.learners))

    def remarks(self) -> list[str]:
        """What a reader should know before the figures."""
        found = [*self.played.complaints]
        if len(self._mine()) < self.expected:
            found.append(f"Incomplete: {len(self._mine())} of {self.expected} episodes have been played.")
        if len({json.dumps(learner.task, sort_keys=True) for learner in self.learners}) > 1:
            found.append("The trained controllers learned on unlike tasks; they are no repetitions of one another.")
        for learner in self.learners:
            changed = differences(learner.task, task_of(self.config))
            if changed:
                told = "; ".join(changed)
                found.append(f"Transfer: {learner.label} learned on another task than is played here ({told}).")
        bare = [line for line in self.bench.reference if not line["fossils"]]
        if bare:
            name = reference_of(self.config)
            found.append(
                f"{name} kept no seed in {len(bare)} of {len(self.bench.reference)} episodes; what is made from these, "
                "such as static_final, is the bare host."
            )
        return found

    def _acting(self, learner: Learner) -> Learned:
        greedy = self.mode(learner) == "greedy"
        learned: Learned = build(self.config.controller.ppo, policy=learner.policy, greedy=greedy, _partial_=False)
        return learned

    def mode(self, learner: Learner) -> str:
        """How a trained controller acts here."""
        said = self.config.controller.ppo.greedy
        return "greedy" if (learner.about["greedy"] if said is None else said) else "sampled"

    def play(self, progress: Progress) -> None:
        """All arms: those that need nothing first, then those that are made from the reference's episodes."""
        late = [name for name in self.arms if ARMS[name].after == "reference"]
        searched = [name for name in self.arms if name == "best_open_loop"]
        self._play(progress, self.played, self.jobs([n for n in self.arms if n not in (*late, *searched)]), test=True)
        if searched:
            self.bench.timetable = self._search(progress)
            self._play(progress, self.played, self.jobs(searched), test=True)
        self.bench.reference = [line for line in self._mine() if line["controller"] == reference_of(self.config)]
        self._play(progress, self.played, self.jobs(late), test=True)

    def jobs(self, arms: Sequence[str]) -> list[Job]:
        return [job for name in arms for job in ARMS[name].jobs(self.bench)]

    def _search(self, progress: Progress) -> list[Entry]:
        """The best of many random timetables, by what it came to on validation, on a seed of its own."""
        space, steps = self.environment.space, self.environment.steps
        count = self.config.schedules or max(learner.about["episodes"] for learner in self.learners)
        seeds = [derive("timetable", self.config.seed, index) for index in range(count)]
        tried = Played(self.directory / "search.jsonl", {})
        jobs = [
            Job("search", None, (seed,), Schedule(space, random_entries(space, steps, seed)), Start(), "chance")
            for seed in seeds
        ]
        self._play(progress, tried, jobs, test=False)
        lines = [line for line in tried.lines if line["seed"] in set(seeds)]
        self._searched = len(lines), sum(line["flops"] for line in lines) / 1e9
        best = max(lines, key=_selection)
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
                **({"commit": commit} if (commit := _commit()) else {}),
            },
            learners={learner.label: {**learner.about, "acts": self.mode(learner)} for learner in self.learners},
            remarks=[*self.remarks(), *self._timetable()],
            reference=reference_of(self.config),
        )

    def _timetable(self) -> list[str]:
        """What the search has found and cost, in words."""
        if self.bench.timetable is None:
            return []
        entries = sorted(self.bench.timetable, key=lambda entry: entry.at)
        told = "; ".join(f"{e.blueprint[0]} in {e.slot} at step {e.at:.0f}, blended by {e.blend}" for e in entries)
        count, gflops = self._searched
        learned = max((learner.about["episodes"] for learner in self.learners), default=count)
        fewer = f" (fewer than the {learned} episodes that the controller learned from)" if count < learned else ""
        return [
            f"best_open_loop is the best of {count} timetables{fewer}, whose search took {gflops:,.0f} GFLOPs that no "
            f"episode is charged for: {told or 'nothing is grown'}."
        ]

    def export(self, meant: str | int) -> tuple[Path, dict[str, Any]]:
        """Play the episode that is meant once more, and keep the network it ends with; its file, and its record."""
        line = self._meant(meant)
        key = key_of(line)
        job = next((job for job in self.jobs([n for n in self.arms if n == key[0]]) if key in job.keys), None)
        if job is None:
            raise ValueError(f"export={meant}: {key[0]} on seed {key[2]} is no episode that this evaluation plays.")
        env = job.keys.index(key)
        again = play(self.environment, [job], {}, lambda: None, test=False)[env]
        for name in ("fossils", "parameters", "selection_score"):
            if again[name] != line[name]:
                raise ValueError(
                    f"export={meant}: played again, {key[0]} on seed {key[2]} ends with {name} {again[name]}, not "
                    f"{line[name]}; hosts are not trained here as they were then."
                )
        arguments = {name: value for name, value in plain(self.config.host).items() if name != "_target_"}
        told = ("controller", "learner", "seed", "score", "test_score", "validation_score", "parameters", "flops")
        path = self.directory / f"grown_{self.played.all.index(line)}.pt"
        export(
            path,
            self.environment.model(env),
            self.environment.committed(env),
            host={"target": self.config.host._target_, "arguments": arguments},
            about={
                **{name: line.get(name) for name in told},
                "data": self.environment.data.preparation(),
                "precision": str(self.config.environment.precision),
            },
        )
        return path, line

    def _meant(self, meant: str | int) -> dict[str, Any]:
        if isinstance(meant, int):
            if self.played.complaints:
                raise ValueError(f"export={meant}: lines cannot be counted where some cannot be read; name an arm.")
            if meant >= len(self.played.all):
                raise ValueError(f"export={meant}: must be below the {len(self.played.all)} episodes that were played.")
            return self.played.all[meant]
        growing = [name for name in self.arms if ARMS[name].grows] or self.arms
        wanted = growing if meant == "best" else [meant]
        return max((line for line in self._mine() if line["controller"] in wanted), key=_selection)

    def _mine(self) -> list[dict[str, Any]]:
        """The episodes that this evaluation asks for; its directory may hold more."""
        seeds = set(self.bench.seeds)
        return [line for line in self.played.lines if line["seed"] in seeds and line["controller"] in self.arms]


def _commit() -> str | None:
    """Which commit of the project this is, and whether it has been changed since; None if that is not known."""
    here = Path(__file__).parent.parent
    if not (here / ".git").exists() or which("git") is None:
        return None
    asked = [["git", "-C", str(here), *rest] for rest in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])]
    name, changes = (subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in asked)
    return f"{name}, with changes" if changes else name or None


def _selection(line: dict[str, Any]) -> float:
    """What an episode may be chosen by: its score on validation."""
    score = line["selection_score"]
    return float("-inf") if score is None else float(score)


def plain(node: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(node, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
