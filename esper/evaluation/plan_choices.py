"""What searches choose for an evaluation: plans of arms, the oracle of each task, and where growth can help."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf

from esper.config import build_environment, known_tasks, task_specs
from esper.environment import EpisodeStart
from esper.evaluation.arm_context import ArmContext
from esper.evaluation.arms import ORACLE, base_name
from esper.evaluation.episode_store import EpisodeStore
from esper.evaluation.halving import FULL_SEED
from esper.evaluation.plan_episodes import PlanEpisodes, RunMissing
from esper.evaluation.plans import Plan
from esper.evaluation.rule_choices import RULE_ARMS, RuleSearches
from esper.evaluation.runner import EpisodeJob, digest
from esper.evaluation.searches import Scope, Searches, SearchOutcome, SearchSettings, search_file

SEARCHED_ARMS = ("best_static", "grow_once", "net2net", "best_open_loop")
ORACLE_ARMS = ("none", "full", *SEARCHED_ARMS)
GROWTH_ARMS = ("full", "grow_once", "gated")  # by which it is judged whether growth can help


@dataclass(frozen=True)
class ChosenPlans:
    """The results of all searches of an evaluation.

    Arguments:
        plans: by arm and task
        summary: by arm, what was chosen and its cost
        oracle: the arm with the best plan of all searches; None without a search
        growth_gains: by task of a distribution, what the best of GROWTH_ARMS gains over none on episode seeds that no
            table uses; empty if these arms are not part of the evaluation
    """

    plans: Mapping[str, Mapping[str, Plan]]
    summary: Mapping[str, Mapping[str, Any]]
    oracle: str | None
    growth_gains: Mapping[str, float] = field(default_factory=dict)


def is_distribution(config: DictConfig) -> bool:
    """Whether an evaluation draws its tasks from a distribution, so that each has searches of its own."""
    return "_target_" in config.tasks


def choose_plans(
    config: DictConfig,
    context: ArmContext,
    arms: Sequence[str],
    wanted: Sequence[str],
    run_missing: RunMissing,
    directory: Path,
) -> ChosenPlans:
    """Run the searches of an evaluation under a budget.

    Arguments:
        config: of the evaluation
        context: of its arms
        arms: all of them
        wanted: those with a search
        run_missing: runs the episodes that a file lacks
        directory: of the evaluation
    """
    environment, per_task = context.environment, is_distribution(config)
    plain: Any = OmegaConf.to_container(config.search, resolve=True)
    settings = SearchSettings(**{key: value for key, value in plain.items() if key != "cache"})
    store = EpisodeStore(search_file(config, environment.space.blueprints, directory))
    episodes = PlanEpisodes(environment, store, run_missing)
    drawn = {environment.host_pool.host_name(episode_seed) for episode_seed in context.episode_seeds}
    names = environment.host_pool.names
    scopes = [(name,) for name in names if name in drawn] if per_task else [names]
    searches = Searches(context, settings, episodes, scopes)
    summary: dict[str, Mapping[str, Any]] = {}
    plans: dict[str, Mapping[str, Plan]] = {}
    if per_task and (by_rule := [arm for arm in wanted if arm in RULE_ARMS]):
        plans, summary = _choose_rules(config, context, by_rule, settings, run_missing, directory)
    for arm in wanted:
        if arm not in plans and arm != ORACLE:
            plans[arm] = searches.find(arm)
    gains: dict[str, float] = {}
    oracle: str | None = None
    if not per_task:
        oracle = _choose_oracle_arm(searches, arms, settings.finalist_seeds)
    elif ORACLE in wanted:
        oracle = ORACLE
        oracles = _TaskOracles(searches, context, settings.finalist_seeds, known_plans(config, context))
        plans[ORACLE], summary[ORACLE] = oracles.choose(plans, arms)
    if per_task and settings.harm_seeds and {"none", *GROWTH_ARMS} <= set(arms):
        gains = _measure_gains(searches, context, episodes, plans["grow_once"], settings.harm_seeds)
    summary = {**_summarise(searches, environment.steps, per_task=per_task), **summary}
    return ChosenPlans(plans, summary, oracle, gains)


def training_config(config: DictConfig) -> DictConfig:
    """The configuration of the same evaluation on the training tasks of its distribution."""
    own = deepcopy(config)
    own.tasks.split = "train"
    own.tasks.counts = {split: count if split == "train" else 0 for split, count in config.tasks.counts.items()}
    return own


def known_plans(config: DictConfig, context: ArmContext) -> dict[str, list[Plan]]:
    """The plans of the shipped list for each task."""
    known, found = known_tasks(config), dict[str, list[Plan]]()
    pool = context.environment.host_pool
    for spec in task_specs(config):
        task = known.find(spec)
        listed = [] if task is None else sorted(task.plans, key=lambda each: -each.score)[:1]
        found[spec.name] = [context.plan_of_fixed(each.plan, pool.slots_of(spec.name)) for each in listed]
    return found


def _choose_rules(
    config: DictConfig,
    context: ArmContext,
    arms: Sequence[str],
    settings: SearchSettings,
    run_missing: RunMissing,
    directory: Path,
) -> tuple[dict[str, Mapping[str, Plan]], dict[str, Mapping[str, Any]]]:
    """The plans on each task of the rules that are best on training tasks, and what their searches cost."""
    own, pool = training_config(config), context.environment.host_pool
    with closing(build_environment(own)) as environment:
        training = replace(context, environment=environment)
        store = EpisodeStore(search_file(own, environment.space.blueprints, directory, "search_train"))
        searches = RuleSearches(training, settings, PlanEpisodes(environment, store, run_missing))
        rules = {arm: searches.find(arm).rule for arm in arms}
    plans = {arm: {task: rule.plan(context, pool.slots_of(task)) for task in pool.names} for arm, rule in rules.items()}
    return dict(plans), {arm: outcome.to_dict() for arm, outcome in searches.outcomes.items()}


def _choose_oracle_arm(searches: Searches, arms: Sequence[str], seeds: int) -> str | None:
    """The arm with the best plan for all hosts, re-estimated on the same episode seeds; None without a search."""
    (scope,) = searches.scopes
    candidates = [arm for arm in ORACLE_ARMS if arm in arms]
    if not set(candidates) & set(searches.outcomes):
        return None
    scores, _ = searches.re_estimate({scope: [searches.plan_of(arm, scope) for arm in candidates]}, seeds)[scope]
    return max(zip(scores, candidates, strict=True), key=lambda pair: pair[0])[1]


class _TaskOracles:
    """Chooses the best plan of each task, re-estimated on the same episode seeds of the search."""

    def __init__(
        self, searches: Searches, context: ArmContext, seeds: int, known: Mapping[str, Sequence[Plan]]
    ) -> None:
        self._searches, self._context, self._seeds, self._known = searches, context, seeds, known

    def choose(
        self, plans: Mapping[str, Mapping[str, Plan]], arms: Sequence[str]
    ) -> tuple[dict[str, Plan], dict[str, Any]]:
        """The best plan of each task, and a summary with the arm that it comes from."""
        searches, steps = self._searches, self._context.environment.steps
        candidates = {scope: self._candidates(scope, plans, arms) for scope in searches.scopes}
        found = searches.re_estimate({scope: list(own.values()) for scope, own in candidates.items()}, self._seeds)
        chosen, rows = {}, {}
        for scope, own in candidates.items():
            scores, trials = found[scope]
            score, origin = max(zip(scores, own, strict=True), key=lambda pair: pair[0])
            (task,) = scope
            chosen[task] = own[origin]
            rows[task] = SearchOutcome(own[origin], score, *searches.cost(scope, trials)).to_dict(steps)
            rows[task]["plan"] = f"{origin}: {rows[task]['plan']}"
        return chosen, {"tasks": rows}

    def _candidates(
        self, scope: Scope, plans: Mapping[str, Mapping[str, Plan]], arms: Sequence[str]
    ) -> dict[str, Plan]:
        """Distinct plans by the arm that has them, or `list`."""
        (task,) = scope
        slots = self._searches.slots_of(scope)
        every = [(arm, self._searches.plan_of(arm, scope)) for arm in ("none", "full")]
        every += [(arm, plans[arm][task]) for arm in arms if base_name(arm) in SEARCHED_ARMS and arm in plans]
        if self._context.fixed_plan is not None:
            every.append(("best_fixed", self._context.plan_of_fixed(self._context.fixed_plan, slots)))
        every += [("list", plan) for plan in self._known.get(task, ())]
        distinct: dict[str, tuple[str, Plan]] = {}
        for origin, plan in every:
            own = plan.within(slots)
            distinct.setdefault(own.digest, (origin, own))
        return dict(distinct.values())


def _measure_gains(
    searches: Searches, context: ArmContext, episodes: PlanEpisodes, moments: Mapping[str, Plan], seeds: int
) -> dict[str, float]:
    """By task, the best mean score of GROWTH_ARMS minus that of none, on episode seeds of the search."""
    plans = {
        scope: [
            *(searches.plan_of(arm, scope) for arm in ("none", "full")),
            moments[scope[0]].within(searches.slots_of(scope)),
        ]
        for scope in searches.scopes
    }
    found = searches.re_estimate(plans, seeds)
    gated, settings = context.build_rule("gated"), context.settings("gated")
    name = f"gated, {digest(settings)}"
    jobs = [
        EpisodeJob(name, None, (episode_seed,), gated, EpisodeStart(), name)
        for scope in searches.scopes
        for number in range(seeds)
        for episode_seed in searches.episode_seeds_of(scope, FULL_SEED + number)
    ]
    by_rule = episodes.scores_of_jobs(jobs)
    gains = {}
    for row, scope in enumerate(searches.scopes):
        none, *grown = found[scope][0]
        gains[scope[0]] = max(*grown, fmean(by_rule[row * seeds : (row + 1) * seeds])) - none
    return gains


def _summarise(searches: Searches, steps: int, *, per_task: bool) -> dict[str, Mapping[str, Any]]:
    """The outcomes of all searches by arm, as plain data; with a part for each task where each has its own."""
    found: dict[str, Mapping[str, Any]] = {}
    for arm, outcomes in searches.outcomes.items():
        plain = {scope: outcome.to_dict(steps) for scope, outcome in outcomes.items()}
        by_task = {"tasks": {scope[0]: own for scope, own in plain.items()}}
        found[arm] = by_task if per_task else next(iter(plain.values()))
    return found
