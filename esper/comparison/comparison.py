"""One comparison of arms, as a configuration asks for it."""

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

from esper.comparison.choice import check_arms, chosen_arms, recorded_actions, reference_of
from esper.config import build, build_environment, check, hosts
from esper.controllers import Entry, Learned, Schedule, random_entries
from esper.environment import Environment, Start
from esper.evaluation.arms import Bench, arm_of
from esper.evaluation.played import Played, key_of
from esper.evaluation.report import Source
from esper.evaluation.runner import Job, play
from esper.growth import export
from esper.learners import Learner, differences, load_learners, named, task_of
from esper.run import chosen_options
from esper.seeding import derive

PACKAGES = ("torch", "lightning", "hydra-core", "numpy")


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
            seeds=[self.environment.seed("evaluation", config.seed, index) for index in range(config.episodes)],
            rule=lambda name: build(config.controller[name], space=self.environment.space, _partial_=False),
            settings=lambda name: plain(config.controller[name]),
            learners={learner.label: self._acting(learner) for learner in self.learners},
            weights={learner.label: f"{learner.weights}, {self.mode(learner)}" for learner in self.learners},
            ways={learner.label: learner.way for learner in self.learners},
            repeated=recorded_actions(config) if config.replay.records and "replay" in self.arms else None,
        )
        host = chosen_options().get("host", config.host.get("_target_", "").rpartition(".")[2])
        self.played = Played(directory / "episodes.jsonl", {"host": host, "config": plain(config)})
        if isinstance(config.export, int) and config.export >= max(self.expected, len(self.played.all)):
            raise ValueError(f"export={config.export}: must be below the {self.expected} episodes that are played.")

    @property
    def expected(self) -> int:
        """How many episodes there are in the end."""
        reference = arm_of(reference_of(self.config)).after
        after = {name: arm_of(name).after for name in self.arms if name != "replay" or self.bench.repeated is None}
        by_learner = [name for name, what in after.items() if (reference if what == "reference" else what) == "ckpt"]
        alone = len(self.arms) - len(by_learner)
        return len(self.bench.seeds) * (alone + len(by_learner) * len(self.learners))

    def remarks(self) -> list[str]:
        """What a reader should know before the figures."""
        found = [*self.played.complaints]
        if len(self._mine()) < self.expected:
            found.append(f"Incomplete: {len(self._mine())} of {self.expected} episodes have been played.")
        ways = list(dict.fromkeys(learner.way for learner in self.learners))
        if len(ways) > 1:
            arms = [f"ppo ({number})" for number in range(2, len(ways) + 1)]
            found.append(
                "The trained controllers learned on unlike tasks, or in unlike ways; they are no repetitions of one "
                f"another, but arms of their own in the order of ckpt: ppo, {', '.join(arms)}."
            )
        stock, episodes = len(self.environment.stock), len(self.bench.seeds)
        if stock > 1 and episodes % (2 * stock**2):
            found.append(f"episodes={episodes}: each host comes as often with a multiple of {2 * stock**2}.")
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
        late = [name for name in self.arms if arm_of(name).after == "reference"]
        searched = [name for name in self.arms if name == "best_open_loop"]
        self._play(progress, self.played, self.jobs([n for n in self.arms if n not in (*late, *searched)]), test=True)
        if searched:
            self.bench.timetable = self._search(progress)
            self._play(progress, self.played, self.jobs(searched), test=True)
        self.bench.reference = [line for line in self._mine() if line["controller"] == reference_of(self.config)]
        self._play(progress, self.played, self.jobs(late), test=True)

    def jobs(self, arms: Sequence[str]) -> list[Job]:
        return [job for name in arms for job in arm_of(name).jobs(self.bench)]

    def _search(self, progress: Progress) -> list[Entry]:
        """The best of many random timetables, by what it came to on validation, in an episode of each host."""
        space, steps, stock = self.environment.space, self.environment.steps, self.environment.stock
        episodes = self.config.schedules or max(learner.about["episodes"] for learner in self.learners)
        count = max(1, episodes // len(stock))
        seeds = [stock.seeds("timetable", self.config.seed, index) for index in range(count)]
        tables = [random_entries(space, steps, derive("timetable", self.config.seed, index)) for index in range(count)]
        tried = Played(self.directory / "search.jsonl", {})
        jobs = [
            Job("search", None, (seed,), Schedule(space, table), Start(), "chance")
            for table, own in zip(tables, seeds, strict=True)
            for seed in own
        ]
        self._play(progress, tried, jobs, test=False)
        lines = {line["seed"]: line for line in tried.lines}
        self._searched = count, sum(lines[seed]["flops"] for own in seeds for seed in own) / 1e9
        return tables[max(range(count), key=lambda index: sum(_selection(lines[seed]) for seed in seeds[index]))]

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
            searched=None if self.bench.timetable is None else self._searched[1] / len(self.environment.stock),
        )

    def _timetable(self) -> list[str]:
        """What the search has found and cost, in words."""
        if self.bench.timetable is None:
            return []
        entries = sorted(self.bench.timetable, key=lambda entry: entry.at)
        told = "; ".join(f"{e.blueprint[0]} in {e.slot} at step {e.at:.0f}, blended by {e.blend}" for e in entries)
        count, gflops = self._searched
        episodes = count * len(self.environment.stock)
        learned = max((learner.about["episodes"] for learner in self.learners), default=episodes)
        fewer = f" (fewer than the {learned} episodes that the controller learned from)" if episodes < learned else ""
        each = f", each on {len(self.environment.stock)} hosts" if episodes > count else ""
        return [
            f"best_open_loop is the best of {count} timetables{each}{fewer}, whose search took {gflops:,.0f} GFLOPs "
            f"that no episode is charged for: {told or 'nothing is grown'}."
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
        host = plain(hosts(self.config)[self.environment.stock.name(line["seed"])])
        told = ("controller", "learner", "seed", "score", "test_score", "validation_score", "parameters", "flops")
        path = self.directory / f"grown_{self.played.all.index(line)}.pt"
        export(
            path,
            self.environment.model(env),
            self.environment.committed(env),
            host={"target": host.pop("_target_"), "arguments": host},
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
        growing = [name for name in self.arms if arm_of(name).grows] or self.arms
        wanted = growing if meant == "best" else [meant]
        return max((line for line in self._mine() if line["controller"] in wanted), key=_selection)

    def _mine(self) -> list[dict[str, Any]]:
        """The episodes that this evaluation asks for; its directory may hold more."""
        seeds = set(self.bench.seeds)
        return [line for line in self.played.lines if line["seed"] in seeds and line["controller"] in self.arms]


def _commit() -> str | None:
    """Which commit of the project this is, and whether it has been changed since; None if that is not known."""
    here = Path(__file__).parent.parent.parent
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
