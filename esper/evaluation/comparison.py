"""One comparison of arms, as a configuration describes it."""

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

from esper.checkpoints import (
    TrainedController,
    checkpoint_names,
    describe_differences,
    load_controllers,
    task_settings,
)
from esper.config import build, build_environment, check_config, chosen_options, host_nodes
from esper.controllers import PolicyController, ScheduleController, ScheduleEntry, random_schedule
from esper.environment import Environment, EpisodeStart
from esper.evaluation.arms import ArmContext, get_arm
from esper.evaluation.episode_store import EpisodeStore, episode_key
from esper.evaluation.runner import EpisodeJob, run_jobs
from esper.evaluation.sections import Provenance
from esper.evaluation.selection import check_arms, load_recorded_actions, reference_arm, selected_arms
from esper.growth import export
from esper.records import EpisodeRecord
from esper.rng import derive_seed

PACKAGES = ("torch", "lightning", "hydra-core", "numpy")
EXPORTED = ("arm", "checkpoint", "episode_seed", "score", "test_score", "validation_score", "parameters", "flops")


class Comparison:
    """The episodes of one comparison: which there are, which are missing, and where they are written."""

    def __init__(self, config: DictConfig, directory: Path) -> None:
        check_arms(config)
        check_config(config)
        self.config, self.directory = config, directory
        self.arms = selected_arms(config)
        self.environment: Environment = build_environment(config)
        self.controllers: list[TrainedController] = load_controllers(
            checkpoint_names(config.ckpt), self.environment.layout
        )
        self.context = ArmContext(
            environment=self.environment,
            episode_seeds=[
                self.environment.episode_seed("evaluation", config.seed, index) for index in range(config.episodes)
            ],
            build_rule=lambda name: build(config.controller[name], space=self.environment.space, _partial_=False),
            settings=lambda name: to_plain_config(config.controller[name]),
            policies={trained.label: self._acting(trained) for trained in self.controllers},
            weights={trained.label: f"{trained.weights_digest}, {self.mode(trained)}" for trained in self.controllers},
            training_digests={trained.label: trained.training_digest for trained in self.controllers},
            recorded=load_recorded_actions(config) if config.replay.records and "replay" in self.arms else None,
        )
        host = chosen_options().get("host", config.host.get("_target_", "").rpartition(".")[2])
        recorded = to_plain_config(config)
        recorded["slots"]["blueprints"] = list(self.environment.space.blueprints)  # null is all that are registered now
        self.store = EpisodeStore(directory / "episodes.jsonl", host=host, config=recorded)
        if isinstance(config.export, int) and config.export >= max(self.expected, len(self.store.all)):
            raise ValueError(f"export={config.export}: must be below the {self.expected} episodes of this evaluation.")

    @property
    def expected(self) -> int:
        """How many episodes there are when all are finished."""
        reference = get_arm(reference_arm(self.config)).needs
        needs = {name: get_arm(name).needs for name in self.arms if name != "replay" or self.context.recorded is None}
        per_checkpoint = [
            name for name, need in needs.items() if (reference if need == "reference" else need) == "ckpt"
        ]
        others = len(self.arms) - len(per_checkpoint)
        return len(self.context.episode_seeds) * (others + len(per_checkpoint) * len(self.controllers))

    def remarks(self) -> list[str]:
        """What a reader should know before the figures."""
        found = [*self.store.complaints]
        if len(self._requested()) < self.expected:
            found.append(f"Incomplete: {len(self._requested())} of {self.expected} episodes are finished.")
        digests = list(dict.fromkeys(trained.training_digest for trained in self.controllers))
        if len(digests) > 1:
            arms = [f"ppo ({number})" for number in range(2, len(digests) + 1)]
            found.append(
                "The trained controllers differ in their task or training settings; they are not repetitions of one "
                f"another, but separate arms in the order of ckpt: ppo, {', '.join(arms)}."
            )
        hosts, episodes = len(self.environment.host_pool), len(self.context.episode_seeds)
        if hosts > 1 and episodes % (2 * hosts**2):
            found.append(
                f"episodes={episodes}: every host has the same number of episodes with a multiple of {2 * hosts**2}."
            )
        task = {**task_settings(self.config), "slots.blueprints": list(self.environment.space.blueprints)}
        for trained in self.controllers:
            changed = describe_differences(trained.task, task)
            if changed:
                found.append(f"Transfer: {trained.label} was trained on another task ({'; '.join(changed)}).")
        bare = [line for line in self.context.reference if not line.fossils]
        if bare:
            found.append(
                f"{reference_arm(self.config)} kept no seed in {len(bare)} of {len(self.context.reference)} episodes; "
                "arms derived from these, such as static_final, are the bare host."
            )
        return found

    def _acting(self, trained: TrainedController) -> PolicyController:
        greedy = self.mode(trained) == "greedy"
        controller: PolicyController = build(
            self.config.controller.ppo, policy=trained.policy, greedy=greedy, _partial_=False
        )
        return controller

    def mode(self, trained: TrainedController) -> str:
        """How a trained controller acts here."""
        configured = self.config.controller.ppo.greedy
        return "greedy" if (trained.info.greedy if configured is None else configured) else "sampled"

    def run(self, progress: Progress) -> None:
        """All arms: those that need nothing first, then those that are derived from the reference's episodes."""
        late = [name for name in self.arms if get_arm(name).needs == "reference"]
        searched = [name for name in self.arms if name == "best_open_loop"]
        first = [name for name in self.arms if name not in (*late, *searched)]
        self._run_missing(progress, self.store, self.jobs(first), test=True)
        if searched:
            self.context.best_schedule = self._search(progress)
            self._run_missing(progress, self.store, self.jobs(searched), test=True)
        self.context.reference = [line for line in self._requested() if line.arm == reference_arm(self.config)]
        self._run_missing(progress, self.store, self.jobs(late), test=True)

    def jobs(self, arms: Sequence[str]) -> list[EpisodeJob]:
        return [job for name in arms for job in get_arm(name).jobs(self.context)]

    def _search(self, progress: Progress) -> list[ScheduleEntry]:
        """The random schedule with the highest validation score, over one episode of each host."""
        space, steps, pool = self.environment.space, self.environment.steps, self.environment.host_pool
        episodes = self.config.schedules or max(trained.info.episodes for trained in self.controllers)
        count = max(1, episodes // len(pool))
        seeds = [pool.episode_seeds("schedule", self.config.seed, index) for index in range(count)]
        schedules = [
            random_schedule(space, steps, derive_seed("schedule", self.config.seed, index)) for index in range(count)
        ]
        tried = EpisodeStore(self.directory / "search.jsonl")
        jobs = [
            EpisodeJob("search", None, (seed,), ScheduleController(space, schedule), EpisodeStart(), "random")
            for schedule, own in zip(schedules, seeds, strict=True)
            for seed in own
        ]
        self._run_missing(progress, tried, jobs, test=False)
        lines = {line.episode_seed: line for line in tried.latest}
        self._searched = count, sum(lines[seed].flops for own in seeds for seed in own) / 1e9
        return schedules[max(range(count), key=lambda index: sum(_selection(lines[seed]) for seed in seeds[index]))]

    def _run_missing(self, progress: Progress, store: EpisodeStore, jobs: Sequence[EpisodeJob], *, test: bool) -> None:
        waiting = sum(len(job.episode_seeds) for job in store.missing(jobs))
        task = progress.add_task("", total=waiting * self.environment.steps)

        def advance(some: Sequence[EpisodeJob]) -> None:
            names = ", ".join(dict.fromkeys(job.arm for job in some))
            progress.update(task, advance=sum(len(job.episode_seeds) for job in some), description=names)

        store.run_missing(self.environment, jobs, advance, test=test)
        progress.remove_task(task)

    def provenance(self, commands: Sequence[str]) -> Provenance:
        """How the episodes came about, for the report and for a later resume."""
        trained = dict.fromkeys(trained.info.command for trained in self.controllers)
        machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, device {self.config.device}"
        return Provenance(
            commands=[command for command in dict.fromkeys([*trained, *commands]) if command],
            versions={
                "esper": version("esper"),
                "python": platform.python_version(),
                **{name: version(name) for name in PACKAGES},
                "machine": machine,
                **({"commit": commit} if (commit := _commit()) else {}),
            },
            checkpoints={
                trained.label: {**trained.info.to_dict(), "acts": self.mode(trained)} for trained in self.controllers
            },
            remarks=[*self.remarks(), *self._describe_search()],
            reference=reference_arm(self.config),
            search_gflops=(
                None if self.context.best_schedule is None else self._searched[1] / len(self.environment.host_pool)
            ),
        )

    def _describe_search(self) -> list[str]:
        """What the search for a schedule found and cost, in a sentence."""
        if self.context.best_schedule is None:
            return []
        entries = sorted(self.context.best_schedule, key=lambda entry: entry.at)
        plan = "; ".join(f"{e.blueprint[0]} in {e.slot} at step {e.at:.0f}, blended by {e.blend}" for e in entries)
        count, gflops = self._searched
        hosts = len(self.environment.host_pool)
        episodes = count * hosts
        trained = max((trained.info.episodes for trained in self.controllers), default=episodes)
        fewer = f" (fewer than the {trained} episodes that the controller learned from)" if episodes < trained else ""
        each = f", each on {hosts} hosts" if episodes > count else ""
        return [
            f"best_open_loop is the best of {count} random schedules{each}{fewer}; the search took {gflops:,.0f} "
            f"GFLOPs, which no episode is charged for: {plan or 'nothing is grown'}."
        ]

    def export(self, selector: str | int) -> tuple[Path, EpisodeRecord]:
        """Run the selected episode once more, and save the network it ends with; its file, and its record."""
        line = self._selected(selector)
        key = episode_key(line)
        job = next((job for job in self.jobs([n for n in self.arms if n == key[0]]) if key in job.keys), None)
        if job is None:
            raise ValueError(f"export={selector}: {key[0]} on episode seed {key[2]} is not part of this evaluation.")
        env = job.keys.index(key)
        again = run_jobs(self.environment, [job], {}, lambda: None, test=False)[env]
        for name in ("fossils", "parameters", "selection_score"):
            before, now = getattr(line, name), getattr(again, name)
            if now != before:
                raise ValueError(
                    f"export={selector}: run again, {key[0]} on episode seed {key[2]} ends with {name} {now}, not "
                    f"{before}; hosts do not train here as they did then."
                )
        host = to_plain_config(host_nodes(self.config)[self.environment.host_pool.host_name(line.episode_seed)])
        path = self.directory / f"grown_{self.store.all.index(line)}.pt"
        export(
            path,
            self.environment.model(env),
            self.environment.committed_settings(env),
            host={"target": host.pop("_target_"), "arguments": host},
            about={
                **{name: getattr(line, name) for name in EXPORTED},
                "data": self.environment.data.preparation(),
                "precision": str(self.config.environment.precision),
            },
        )
        return path, line

    def _selected(self, selector: str | int) -> EpisodeRecord:
        if isinstance(selector, int):
            if self.store.complaints:
                raise ValueError(f"export={selector}: some lines cannot be read, so lines have no number; name an arm.")
            if selector >= len(self.store.all):
                raise ValueError(f"export={selector}: must be below the {len(self.store.all)} finished episodes.")
            return self.store.all[selector]
        growing = [name for name in self.arms if get_arm(name).grows] or self.arms
        wanted = growing if selector == "best" else [selector]
        return max((line for line in self._requested() if line.arm in wanted), key=_selection)

    def _requested(self) -> list[EpisodeRecord]:
        """The finished episodes that this evaluation needs; its directory may hold more."""
        seeds = set(self.context.episode_seeds)
        return [line for line in self.store.latest if line.episode_seed in seeds and line.arm in self.arms]


def _commit() -> str | None:
    """The commit of the project, and whether files have changed since; None if that is not known."""
    project = Path(__file__).parent.parent.parent
    if not (project / ".git").exists() or which("git") is None:
        return None
    commands = [
        ["git", "-C", str(project), *rest] for rest in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain"])
    ]
    name, changes = (subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in commands)
    return f"{name}, with changes" if changes else name or None


def _selection(line: EpisodeRecord) -> float:
    """What an episode may be chosen by: its score on validation."""
    return float("-inf") if line.selection_score is None else line.selection_score


def to_plain_config(node: DictConfig) -> dict[str, Any]:
    found = OmegaConf.to_container(node, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items()}
