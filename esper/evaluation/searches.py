"""The searches that choose plans for arms, by validation score on episode seeds of their own."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from esper.checkpoints import task_settings
from esper.environment import Environment
from esper.evaluation.arm_jobs import ArmContext
from esper.evaluation.episode_store import EpisodeStore
from esper.evaluation.halving import Choice, Trial, choose_finalist, halve, re_estimate, search_grid
from esper.evaluation.plans import MOMENTS, Plan, first_blueprint, schedule_plans, static_plans
from esper.evaluation.runner import EpisodeJob, digest
from esper.records import EpisodeRecord

SEED_STREAM = "search"  # episode seeds of searches; no evaluation and no training run has them
SEARCH_TASK = ("host", "data", "tasks", "slots", "actions", "lifecycle", "environment", "optimizer", "governor")
ORACLE_ARMS = ("none", "full", "best_static", "grow_once", "net2net", "best_open_loop")
RunMissing = Callable[[EpisodeStore, Sequence[EpisodeJob]], None]
PlanTrial = Trial[Plan]


@dataclass(frozen=True)
class SearchSettings:
    """The group `search`.

    Arguments:
        budgets: cost of each prefix of a successive halving, in budgets of an episode, ascending
        finalists: candidates of a successive halving that are measured again
        finalist_seeds: episode seeds of each of them
        lr_scales: factors of the learning rate that the arms named *_lr choose from; None is none
        seed: the episode seeds of searches are derived from it
    """

    budgets: Sequence[float]
    finalists: int
    finalist_seeds: int
    lr_scales: Sequence[float] | None
    seed: int


@dataclass(frozen=True)
class SearchOutcome:
    """What a search has chosen for an arm, and what that has cost."""

    plan: Plan
    score: float  # on validation
    gflops: float
    episodes: int
    prefixes: dict[float, "SearchOutcome"] = field(default_factory=dict)  # by budgets, of a successive halving

    def to_dict(self, steps: int) -> dict[str, Any]:
        """As plain data."""
        return {
            "plan": self.plan.describe(steps),
            "score": self.score if math.isfinite(self.score) else None,  # None: non-finite values in all trials
            "gflops": self.gflops,
            "episodes": self.episodes,
            **({"prefixes": {f"{budgets:g}": outcome.to_dict(steps) for budgets, outcome in self.prefixes.items()}}
               if self.prefixes else {}),
        }  # fmt: skip


class Searches:
    """Runs the searches of a comparison; a result is kept, and its episodes are in a file that other runs read.

    Arguments:
        context: environment and default blueprint
        settings: of the searches
        store: of their episodes
        run_missing: runs the jobs that the store does not have
    """

    def __init__(
        self, context: ArmContext, settings: SearchSettings, store: EpisodeStore, run_missing: RunMissing
    ) -> None:
        self._context, self._settings = context, settings
        self._environment: Environment = context.environment
        self._store, self._run_missing = store, run_missing
        self.outcomes: dict[str, SearchOutcome] = {}

    def find(self, arm: str) -> SearchOutcome:
        """The result of an arm's search; of best_static@4, of its prefix of four budgets."""
        base, _, budgets = arm.partition("@")
        if base not in self.outcomes:
            search: Callable[[], SearchOutcome] | None = {
                "best_static": self._search_static,
                "best_open_loop": self._search_schedules,
                "grow_once": lambda: self._search_moment(lambda tau: self._context.filled_plan(at=tau)),
                "net2net": lambda: self._search_moment(self._context.widened_plan),
            }.get(base)
            self.outcomes[base] = self._search_lr_scale(base.removesuffix("_lr")) if search is None else search()
        outcome = self.outcomes[base]
        return outcome.prefixes[float(budgets)] if budgets else outcome

    def choose_oracle(self, arms: Sequence[str]) -> str | None:
        """The arm with the best plan of all searches, re-estimated on the same episode seeds; None without a search."""
        plans = {arm: self._plan_of(arm) for arm in ORACLE_ARMS if arm in arms}
        if not set(plans) & set(self.outcomes):
            return None
        scores, _ = re_estimate(list(plans.values()), self.measure, self._settings.finalist_seeds)
        return max(zip(scores, plans, strict=True), key=lambda pair: pair[0])[1]

    def summary(self, steps: int) -> dict[str, dict[str, Any]]:
        """The outcomes of all searches by arm, as plain data."""
        return {arm: outcome.to_dict(steps) for arm, outcome in self.outcomes.items()}

    def measure(self, trials: Sequence[PlanTrial]) -> list[float]:
        """The validation score of each trial, the mean over hosts; the lowest for non-finite values."""
        jobs = {self._key(trial): self._jobs(trial) for trial in trials}
        self._run_missing(self._store, [job for own in jobs.values() for job in own])
        return [_mean_score(self._records(trial)) for trial in trials]

    def _plan_of(self, arm: str) -> Plan:
        if arm == "none":
            return Plan(self._context.blind_start)
        return self._context.filled_plan() if arm == "full" else self.find(arm).plan

    def _search_static(self) -> SearchOutcome:
        pool, space = self._environment.host_pool, self._environment.space
        by_host = [pool.variants(name) for name in pool.names]
        variants = [name for name in by_host[0] if all(name in other for other in by_host)]
        blueprint = first_blueprint(self._context.blueprint, space)
        plans = static_plans(space, variants, blueprint, self._settings.seed, self._context.blind_start)
        return self._halve(plans)

    def _search_schedules(self) -> SearchOutcome:
        environment = self._environment
        blueprint = first_blueprint(self._context.blueprint, environment.space)
        rules, steps = environment.rules, environment.steps
        start, exists = self._context.blind_start, environment.host_pool.exists_by_host()
        plans = schedule_plans(environment.space, rules, steps, blueprint, self._settings.seed, start, exists)
        return self._halve(plans)

    def _halve(self, plans: Iterator[Plan]) -> SearchOutcome:
        settings = self._settings
        choices = halve(plans, self.measure, settings.budgets)
        final = choose_finalist(choices[-1], self.measure, settings.finalists, settings.finalist_seeds)
        prefixes = {choice.budget: self._outcome(choice) for choice in choices[:-1] if choice.budget is not None}
        return replace(self._outcome(final), prefixes=prefixes)

    def _search_moment(self, plan_at: Callable[[float], Plan]) -> SearchOutcome:
        return self._outcome(search_grid([plan_at(moment) for moment in MOMENTS], self.measure))

    def _search_lr_scale(self, arm: str) -> SearchOutcome:
        """The best learning rate for the plan of an arm; a search for that plan is charged too."""
        plan = self._plan_of(arm)
        choice = search_grid([plan.with_lr_scale(scale) for scale in self._settings.lr_scales or (1.0,)], self.measure)
        outcome, earlier = self._outcome(choice), self.outcomes.get(arm)
        if earlier is None:
            return outcome
        gflops, episodes = outcome.gflops + earlier.gflops, outcome.episodes + earlier.episodes
        return replace(outcome, gflops=gflops, episodes=episodes)

    def _outcome(self, choice: Choice[Plan]) -> SearchOutcome:
        distinct = {self._key(trial): trial for trial in choice.trials}
        records = [record for trial in distinct.values() for record in self._records(trial)]
        gflops = sum(record.flops for record in records) / 1e9
        return SearchOutcome(choice.candidate, choice.score, gflops, len(records))

    def _key(self, trial: PlanTrial) -> tuple[str, int]:
        return f"{trial.candidate.digest}, {trial.share:g} of the budget", trial.seed

    def _episode_seeds(self, trial: PlanTrial) -> list[int]:
        """One for each host."""
        return self._environment.host_pool.episode_seeds(SEED_STREAM, self._settings.seed, trial.seed)

    def _jobs(self, trial: PlanTrial) -> list[EpisodeJob]:
        name, _ = self._key(trial)
        plan, environment = trial.candidate, self._environment
        controller = plan.controller(environment.space, environment.rules)
        start = replace(plan.start, budget=plan.start.budget * trial.share)
        return [
            EpisodeJob(name, None, (episode_seed,), controller, start, name)
            for episode_seed in self._episode_seeds(trial)
        ]

    def _records(self, trial: PlanTrial) -> list[EpisodeRecord]:
        name, _ = self._key(trial)
        return [self._store.find(name, episode_seed) for episode_seed in self._episode_seeds(trial)]


def _mean_score(records: Sequence[EpisodeRecord]) -> float:
    scores = [record.selection_score for record in records]
    known = [score for score in scores if score is not None]
    return sum(known) / len(known) if len(known) == len(scores) else float("-inf")


def search_file(config: DictConfig, blueprints: Sequence[str], directory: Path) -> Path:
    """The file of the episodes of all searches on a task; evaluations of the same task share it."""
    if config.search.cache is None:
        return directory / "search.jsonl"
    task = {**task_settings(config, SEARCH_TASK), "slots.blueprints": list(blueprints), "version": version("esper")}
    return Path(config.search.cache) / f"{digest(task)}.jsonl"
