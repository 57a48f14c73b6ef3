"""One comparison of arms, as its configuration describes it."""

from collections.abc import Sequence
from pathlib import Path
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
from esper.config import build, build_environment, build_with, check_config, chosen_options, host_nodes, variant_nodes
from esper.controllers import Controller, PolicyController
from esper.environment import Environment
from esper.evaluation.agents import agent_name, agent_settings, build_agent
from esper.evaluation.arms import ArmContext, get_arm
from esper.evaluation.episode_store import EpisodeStore, episode_key
from esper.evaluation.plan_choices import ChosenPlans, choose_plans
from esper.evaluation.plan_episodes import selection_score
from esper.evaluation.provenance import Provenance, current_versions
from esper.evaluation.runner import EpisodeJob, run_jobs
from esper.evaluation.schedule_search import ScheduleSearch, search_schedules
from esper.evaluation.selection import check_arms, fixed_plan, load_recorded_actions, reference_arm, selected_arms
from esper.growth import export
from esper.records import EpisodeRecord

EXPORTED = ("arm", "checkpoint", "episode_seed", "score", "test_score", "validation_score", "parameters", "flops")


class Comparison:
    """The episodes of one comparison: runs those that are missing, and exports grown networks.

    Arguments:
        config: of `esper.evaluate`
        directory: of episodes.jsonl, search.jsonl and exported networks
    """

    def __init__(self, config: DictConfig, directory: Path) -> None:
        check_config(config)
        check_arms(config)
        self.config, self.directory = config, directory
        self.arms = selected_arms(config)
        self.environment: Environment = build_environment(config)
        self.controllers: list[TrainedController] = load_controllers(
            checkpoint_names(config.ckpt), self.environment.layout
        )
        self._schedule_search: ScheduleSearch | None = None
        self._chosen: ChosenPlans | None = None
        self.context = ArmContext(
            environment=self.environment,
            episode_seeds=[
                self.environment.episode_seed("evaluation", config.seed, index) for index in range(config.episodes)
            ],
            build_rule=self._build_rule,
            settings=self._rule_settings,
            policies={trained.label: self._build_policy_controller(trained) for trained in self.controllers},
            weights={
                trained.label: f"{trained.weights_digest}, {self.action_mode(trained)}" for trained in self.controllers
            },
            training_digests={trained.label: trained.training_digest for trained in self.controllers},
            recorded_actions=load_recorded_actions(config) if config.replay.records and "replay" in self.arms else None,
            blueprint=list(config.blueprint),
            net2net_host=config.net2net_host,
            fixed_plan=fixed_plan(config),
        )
        host = chosen_options().get("host", config.host.get("_target_", "").rpartition(".")[2])
        recorded_config = to_plain_config(config)
        recorded_config["slots"]["blueprints"] = list(self.environment.space.blueprints)  # null: all that exist now
        self.store = EpisodeStore(directory / "episodes.jsonl", host=host, config=recorded_config)
        if isinstance(config.export, int) and config.export >= max(self.episode_count, len(self.store.episodes)):
            raise ValueError(
                f"export={config.export}: must be below the {self.episode_count} episodes of this evaluation."
            )

    @property
    def episode_count(self) -> int:
        """How many episodes there are when all are finished."""
        reference = get_arm(reference_arm(self.config)).needs
        needs = {
            name: get_arm(name).needs for name in self.arms if name != "replay" or self.context.recorded_actions is None
        }
        per_checkpoint = [
            name for name, need in needs.items() if (reference if need == "reference" else need) == "ckpt"
        ]
        others = len(self.arms) - len(per_checkpoint)
        return len(self.context.episode_seeds) * (others + len(per_checkpoint) * len(self.controllers))

    def collect_remarks(self) -> list[str]:
        """What a reader should know before the results."""
        remarks = [*self.store.read_errors]
        finished = len(self._requested_episodes())
        if finished < self.episode_count:
            remarks.append(f"Incomplete: {finished} of {self.episode_count} episodes are finished.")
        digests = list(dict.fromkeys(trained.training_digest for trained in self.controllers))
        if len(digests) > 1:
            arms = [f"ppo ({number})" for number in range(2, len(digests) + 1)]
            remarks.append(
                "The trained controllers differ in their task or training settings; they are not repetitions of one "
                f"another, but separate arms in the order of ckpt: ppo, {', '.join(arms)}."
            )
        hosts, episodes = len(self.environment.host_pool), len(self.context.episode_seeds)
        if episodes % hosts:
            remarks.append(f"episodes={episodes}: hosts have unequal numbers of episodes; use a multiple of {hosts}.")
        task = {**task_settings(self.config), "slots.blueprints": list(self.environment.space.blueprints)}
        for trained in self.controllers:
            changed = describe_differences(trained.task, task)
            if changed:
                remarks.append(f"Transfer: {trained.label} was trained on another task ({'; '.join(changed)}).")
            if trained.differences:
                remarks.append(f"{trained.label}: its weights are mapped by name ({'; '.join(trained.differences)}).")
        bare = [episode for episode in self.context.reference if not episode.fossils]
        if bare:
            remarks.append(
                f"{reference_arm(self.config)} fossilised no seed in {len(bare)} of {len(self.context.reference)} "
                "episodes; arms derived from these, such as static_final, are the bare host."
            )
        return remarks

    def _build_rule(self, name: str) -> Controller[Any]:
        """The hand-written controller of an arm, or the agent."""
        if name == agent_name(self.config):
            return build_agent(self.config, self.environment)
        rule: Controller[Any] = build_with(
            self.config.controller[name], space=self.environment.space, rules=self.environment.rules
        )
        return rule

    def _rule_settings(self, name: str) -> dict[str, Any]:
        if name == agent_name(self.config):
            return agent_settings(self.config.agent)
        return to_plain_config(self.config.controller[name])

    def _build_policy_controller(self, trained: TrainedController) -> PolicyController:
        greedy = self.action_mode(trained) == "greedy"
        controller: PolicyController = build(
            self.config.controller.ppo, policy=trained.policy, greedy=greedy, _partial_=False
        )
        return controller

    def action_mode(self, trained: TrainedController) -> str:
        """Whether a trained controller acts greedily or samples in this comparison."""
        configured = self.config.controller.ppo.greedy
        return "greedy" if (trained.info.greedy if configured is None else configured) else "sampled"

    def run(self, progress: Progress) -> None:
        """Run all arms: those that need nothing first, last those that are derived from the reference's episodes."""
        derived = [name for name in self.arms if get_arm(name).needs == "reference"]
        with_search = [name for name in self.arms if get_arm(name).has_search]
        first = [name for name in self.arms if name not in (*derived, *with_search)]
        self._run_missing(progress, self.store, self.create_jobs(first), test=True)
        if with_search:
            self._search_plans(progress, with_search)
            self._run_missing(progress, self.store, self.create_jobs(with_search), test=True)
        reference = reference_arm(self.config)
        self.context.reference = [episode for episode in self._requested_episodes() if episode.arm == reference]
        self._run_missing(progress, self.store, self.create_jobs(derived), test=True)

    def _search_plans(self, progress: Progress, arms: Sequence[str]) -> None:
        """Run the searches of some arms."""

        def run_missing(environment: Environment, store: EpisodeStore, jobs: Sequence[EpisodeJob]) -> None:
            self._run_missing(progress, store, jobs, test=False, environment=environment)

        config = self.config
        if self.environment.is_budgeted:
            self._chosen = choose_plans(config, self.context, self.arms, arms, run_missing, self.directory)
            self.context.plans |= self._chosen.plans
            return
        episodes = config.schedules or max(trained.info.episodes for trained in self.controllers)
        path = self.directory / "search.jsonl"
        self._schedule_search = search_schedules(self.environment, episodes, config.seed, path, run_missing)
        self.context.best_schedule = self._schedule_search.best

    def create_jobs(self, arms: Sequence[str]) -> list[EpisodeJob]:
        return [job for name in arms for job in get_arm(name).create_jobs(self.context)]

    def _run_missing(
        self, progress: Progress, store: EpisodeStore, jobs: Sequence[EpisodeJob], *,
        test: bool, environment: Environment | None = None,
    ) -> None:  # fmt: skip
        """Run the jobs that a store lacks; `environment` is another one than that of the evaluation."""
        missing = sum(len(job.episode_seeds) for job in store.distinct_jobs(jobs))
        task = progress.add_task("", total=missing * self.environment.steps)

        def advance(group: Sequence[EpisodeJob]) -> None:
            names = ", ".join(dict.fromkeys(job.arm if test else "search" for job in group))
            progress.update(task, advance=sum(len(job.episode_seeds) for job in group), description=names)

        store.run_missing(environment or self.environment, jobs, advance, test=test)
        progress.remove_task(task)

    def provenance(self, commands: Sequence[str]) -> Provenance:
        """How the episodes were produced, for the report and for a later resume."""
        training_commands = [trained.info.command for trained in self.controllers]
        search, chosen = self._schedule_search, self._chosen
        trained_for = max((trained.info.episodes for trained in self.controllers), default=0)
        return Provenance(
            commands=[command for command in dict.fromkeys([*training_commands, *commands]) if command],
            versions=current_versions(str(self.config.device)),
            checkpoints={
                trained.label: {**trained.info.to_dict(), "acts": self.action_mode(trained)}
                for trained in self.controllers
            },
            remarks=[*self.collect_remarks(), *([] if search is None else [search.describe(trained_for)])],
            reference=reference_arm(self.config),
            search_gflops=self._schedule_search_gflops(),
            searches={} if chosen is None else chosen.summary,
            oracle=None if chosen is None else chosen.oracle,
            growth_gains={} if chosen is None else chosen.growth_gains,
        )

    def _schedule_search_gflops(self) -> float | None:
        """What the search for best_open_loop took, for each host; None without one for each new host."""
        if self._schedule_search is not None:
            return self._schedule_search.gflops / self._schedule_search.hosts
        found = {} if self._chosen is None else self._chosen.summary.get("best_open_loop", {})
        is_repeated = "gflops" in found and "training_tasks" not in found  # a rule for all tasks is searched once
        return found["gflops"] / len(self.environment.host_pool) if is_repeated else None

    def export_network(self, selector: str | int) -> tuple[Path, EpisodeRecord]:
        """Run the selected episode again and save its network; returns the file, and the episode's record."""
        episode = self._select_episode(selector)
        key = episode_key(episode)
        arm = [name for name in self.arms if name == episode.arm]
        job = next((job for job in self.create_jobs(arm) if key in job.keys), None)
        described = f"{episode.arm} on episode seed {episode.episode_seed}"
        if job is None:
            raise ValueError(f"export={selector}: {described} is not part of this evaluation.")
        env = job.keys.index(key)
        repeated = run_jobs(self.environment, [job], {}, lambda: None, test=False)[env]
        for name in ("fossils", "parameters", "selection_score"):
            before, now = getattr(episode, name), getattr(repeated, name)
            if now != before:
                raise ValueError(
                    f"export={selector}: run again, {described} ends with {name} {now}, not {before}; training is not "
                    "reproducible between that machine or version and this one."
                )
        name, variant = self.environment.host_pool.host_name(episode.episode_seed), job.start.final_host
        own, variants = host_nodes(self.config)[name], variant_nodes(self.config)[name]
        host = to_plain_config(own if variant is None else variants[variant])
        path = self.directory / f"grown_{self.store.episodes.index(episode)}.pt"
        export(
            path,
            self.environment.model(env),
            self.environment.committed_settings(env),
            host={"target": host.pop("_target_"), "arguments": host},
            about={
                **{name: getattr(episode, name) for name in EXPORTED},
                "data": self.environment.host_pool.task(episode.episode_seed).data.preparation(),
                "precision": str(self.config.environment.precision),
            },
        )
        return path, episode

    def _select_episode(self, selector: str | int) -> EpisodeRecord:
        if isinstance(selector, int):
            if self.store.read_errors:
                raise ValueError(
                    f"export={selector}: must be best or an arm; episodes.jsonl has lines that cannot be read, so its "
                    "line numbers are ambiguous."
                )
            if selector >= len(self.store.episodes):
                raise ValueError(f"export={selector}: must be below the {len(self.store.episodes)} finished episodes.")
            return self.store.episodes[selector]
        growing = [name for name in self.arms if get_arm(name).grows] or self.arms
        arms = growing if selector == "best" else [selector]
        return max((episode for episode in self._requested_episodes() if episode.arm in arms), key=selection_score)

    def _requested_episodes(self) -> list[EpisodeRecord]:
        """The finished episodes of this evaluation; its directory may have others from before a resume."""
        episode_seeds = set(self.context.episode_seeds)
        return [
            episode
            for episode in self.store.latest
            if episode.episode_seed in episode_seeds and episode.arm in self.arms
        ]


def to_plain_config(node: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
