"""The searches that choose plans for arms, by validation score on episode seeds of their own.

A scope is the hosts that one search is for: all of them, or in a task distribution each task alone. The searches of all
scopes run their trials together.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig

from esper.checkpoints import task_settings
from esper.evaluation.arm_context import ArmContext
from esper.evaluation.halving import Choice, Search, Trial, halve_to_finalist, re_estimate, run_together, search_grid
from esper.evaluation.plan_episodes import PlanEpisode, PlanEpisodes
from esper.evaluation.plans import MOMENTS, Plan, first_blueprint, schedule_plans, static_plans
from esper.evaluation.runner import digest

SEED_STREAM = "search"  # episode seeds of searches; no evaluation and no training run has them
SEARCH_TASK = ("host", "data", "tasks", "slots", "actions", "lifecycle", "environment", "optimizer", "governor")
PlanTrial = Trial[Plan]
PlanSearch = Search[Plan, list[Choice[Plan]]]
Scope = tuple[str, ...]


@dataclass(frozen=True)
class SearchSettings:
    """The group `search`.

    Arguments:
        budgets: cost of each prefix of a successive halving, in budgets of an episode, ascending
        finalists: candidates of a successive halving that are measured again
        finalist_seeds: episode seeds of each of them
        lr_scales: factors of the learning rate that the arms named *_lr choose from; None is none
        seed: the episode seeds of searches are derived from it
        episodes: of the search for each rule that is chosen on the training tasks of a distribution
        harm_seeds: episodes that show whether growth can help on a task of a distribution; 0 is none
    """

    budgets: Sequence[float]
    finalists: int
    finalist_seeds: int
    lr_scales: Sequence[float] | None
    seed: int
    episodes: int
    harm_seeds: int


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
        episodes: runs trials, and reads their scores
        scopes: each has searches of its own
    """

    def __init__(
        self, context: ArmContext, settings: SearchSettings, episodes: PlanEpisodes, scopes: Sequence[Scope]
    ) -> None:
        self._context, self._settings, self._episodes = context, settings, episodes
        self._environment, self._pool = context.environment, context.environment.host_pool
        self.scopes = scopes
        self.outcomes: dict[str, dict[Scope, SearchOutcome]] = {}

    def find(self, arm: str) -> dict[str, Plan]:
        """The plan of an arm on each task; of best_static@4, that of its prefix of four budgets."""
        base, _, budgets = arm.partition("@")
        found = self._find_outcomes(base)
        chosen = {scope: one.prefixes[float(budgets)] if budgets else one for scope, one in found.items()}
        return {name: outcome.plan for scope, outcome in chosen.items() for name in scope}

    def re_estimate(
        self, plans: Mapping[Scope, Sequence[Plan]], seeds: int
    ) -> dict[Scope, tuple[list[float], list[PlanTrial]]]:
        """The mean score of each plan of each scope, on the same episode seeds as finalists, and the trials of all."""
        return run_together({scope: re_estimate(own, seeds) for scope, own in plans.items()}, self.measure)

    def measure(self, trials: Mapping[Scope, Sequence[PlanTrial]]) -> dict[Scope, list[float]]:
        """The validation score of each trial, the mean over hosts; the lowest for non-finite values."""
        parts = {scope: [self._episodes_of(scope, trial) for trial in own] for scope, own in trials.items()}
        scores = iter(self._episodes.scores([each for own in parts.values() for part in own for each in part]))
        return {scope: [fmean(islice(scores, len(part))) for part in own] for scope, own in parts.items()}

    def cost(self, scope: Scope, trials: Sequence[PlanTrial]) -> tuple[float, int]:
        """GFLOPs and episodes of some trials."""
        return self._episodes.cost([each for trial in trials for each in self._episodes_of(scope, trial)])

    def plan_of(self, arm: str, scope: Scope) -> Plan:
        """The plan of an arm that is not searched, or that of its search."""
        if arm in ("none", "full"):
            plan = Plan(self._context.blind_start) if arm == "none" else self._context.filled_plan()
            return plan.within(self.slots_of(scope))
        return self._find_outcomes(arm)[scope].plan

    def slots_of(self, scope: Scope) -> tuple[str, ...]:
        """The slots of a scope: of a task, or of all hosts."""
        if len(scope) > 1:
            return tuple(self._environment.space.slots)
        return self._pool.slots_of(scope[0])

    def episode_seeds_of(self, scope: Scope, number: int) -> list[int]:
        """One for each host of a scope, of the trials with a number."""
        return [self._pool.episode_seed_of(name, SEED_STREAM, self._settings.seed, number) for name in scope]

    def _find_outcomes(self, arm: str) -> dict[Scope, SearchOutcome]:
        """The outcome of the arm's search in each scope."""
        if arm not in self.outcomes:
            searches: dict[str, Callable[[Scope], PlanSearch]] = {
                "best_static": self._search_static,
                "best_open_loop": self._search_schedules,
                "grow_once": lambda _: search_grid([self._context.filled_plan(at=moment) for moment in MOMENTS]),
                "net2net": lambda _: search_grid([self._context.widened_plan(moment) for moment in MOMENTS]),
            }
            if arm in searches:
                self.outcomes[arm] = self._run(searches[arm])
            else:
                self.outcomes[arm] = self._search_lr_scales(arm.removesuffix("_lr"))
        return self.outcomes[arm]

    def _run(self, search: Callable[[Scope], PlanSearch]) -> dict[Scope, SearchOutcome]:
        choices = run_together({scope: search(scope) for scope in self.scopes}, self.measure)
        outcomes = {}
        for scope, own in choices.items():
            *shorter, final = [self._outcome(scope, choice) for choice in own]
            budgets = [choice.budget for choice in own[:-1]]
            prefixes = {budget: one for budget, one in zip(budgets, shorter, strict=True) if budget is not None}
            outcomes[scope] = replace(final, prefixes=prefixes)
        return outcomes

    def _search_static(self, scope: Scope) -> PlanSearch:
        first, *others = [self._pool.variants(name) for name in scope]
        variants = [name for name in first if all(name in other for other in others)]
        space, seed = self._environment.space, self._settings.seed
        blueprint = first_blueprint(self._context.blueprint, space)
        start = self._context.blind_start
        return self._halve(static_plans(space, variants, blueprint, seed, start, self.slots_of(scope)))

    def _search_schedules(self, scope: Scope) -> PlanSearch:
        environment, seed = self._environment, self._settings.seed
        blueprint = first_blueprint(self._context.blueprint, environment.space)
        rules, steps = environment.rules, environment.steps
        start, exists = self._context.blind_start, self._pool.exists_by_host()
        return self._halve(schedule_plans(environment.space, rules, steps, blueprint, seed, start, exists))

    def _halve(self, plans: Iterator[Plan]) -> PlanSearch:
        settings = self._settings
        return halve_to_finalist(plans, settings.budgets, settings.finalists, settings.finalist_seeds)

    def _search_lr_scales(self, arm: str) -> dict[Scope, SearchOutcome]:
        """The best learning rate for the plan of an arm; a search for that plan is charged too."""
        scales = self._settings.lr_scales or (1.0,)
        plans = {scope: self.plan_of(arm, scope) for scope in self.scopes}
        outcomes = self._run(lambda scope: search_grid([plans[scope].with_lr_scale(scale) for scale in scales]))
        if arm not in self.outcomes:
            return outcomes
        return {
            scope: replace(own, gflops=own.gflops + earlier.gflops, episodes=own.episodes + earlier.episodes)
            for scope, own in outcomes.items()
            for earlier in (self.outcomes[arm][scope],)
        }

    def _outcome(self, scope: Scope, choice: Choice[Plan]) -> SearchOutcome:
        return SearchOutcome(choice.candidate, choice.score, *self.cost(scope, choice.trials))

    def _episodes_of(self, scope: Scope, trial: PlanTrial) -> list[PlanEpisode]:
        """One for each host of a scope."""
        return [PlanEpisode(trial.candidate, seed, trial.share) for seed in self.episode_seeds_of(scope, trial.seed)]


def search_file(config: DictConfig, blueprints: Sequence[str], directory: Path, name: str = "search") -> Path:
    """The file of the episodes of all searches on a task; evaluations of the same task share it."""
    if config.search.cache is None:
        return directory / f"{name}.jsonl"
    task = {**task_settings(config, SEARCH_TASK), "slots.blueprints": list(blueprints), "version": version("esper")}
    return Path(config.search.cache) / f"{digest(task)}.jsonl"
