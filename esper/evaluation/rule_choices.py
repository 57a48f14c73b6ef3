"""The searches for rules on the training tasks of a distribution."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from esper.evaluation.arm_context import ArmContext
from esper.evaluation.plan_episodes import PlanEpisode, PlanEpisodes
from esper.evaluation.plans import MOMENTS, first_blueprint
from esper.evaluation.rule_search import RuleChoice, choose_of_few, choose_of_many
from esper.evaluation.rules import GrowthRule, MomentRule, relative_schedules
from esper.evaluation.searches import SearchSettings

RULE_STREAM = "rule search"  # episode seeds; no evaluation and no training run has them
RULE_ARMS = ("grow_once", "net2net", "best_open_loop")  # that a search on training tasks decides


@dataclass(frozen=True)
class RuleOutcome:
    """What a search has chosen for all tasks, and what that has cost."""

    rule: GrowthRule
    description: str
    score: float  # on validation
    gflops: float
    episodes: int
    tasks: int  # that its score is a mean over

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "plan": self.description,
            "score": self.score if math.isfinite(self.score) else None,  # None: non-finite values
            "gflops": self.gflops,
            "episodes": self.episodes,
            "training_tasks": self.tasks,
        }


class RuleSearches:
    """Finds rules that are best on average over training tasks; a result is kept.

    Arguments:
        context: whose environment draws training tasks
        settings: of the searches
        episodes: runs trials, and reads their scores
    """

    def __init__(self, context: ArmContext, settings: SearchSettings, episodes: PlanEpisodes) -> None:
        self._context, self._settings, self._episodes = context, settings, episodes
        self._pool = context.environment.host_pool
        self.outcomes: dict[str, RuleOutcome] = {}

    def find(self, arm: str) -> RuleOutcome:
        """The outcome of the search for one of RULE_ARMS."""
        if arm not in self.outcomes:
            self.outcomes[arm] = self._outcome(self._choose(arm))
        return self.outcomes[arm]

    def _choose(self, arm: str) -> RuleChoice[GrowthRule]:
        tasks, limit = len(self._pool), self._settings.episodes
        if arm != "best_open_loop":
            moments: list[GrowthRule] = [MomentRule(arm, moment) for moment in MOMENTS]
            return choose_of_few(moments, self._scores, tasks, limit)
        environment, seed = self._context.environment, self._settings.seed
        blueprint = first_blueprint(self._context.blueprint, environment.space)
        exists = self._pool.exists_by_host()
        rules, steps = environment.rules, environment.steps
        schedules = relative_schedules(environment.space, rules, steps, blueprint, seed, exists)
        return choose_of_many(schedules, self._scores, tasks, limit)

    def _scores(self, rules: Sequence[GrowthRule], numbers: range) -> list[float]:
        """The mean score of each rule over the episodes with some numbers."""
        found = self._episodes.scores([each for rule in rules for each in self._episodes_of(rule, numbers)])
        return [fmean(found[start : start + len(numbers)]) for start in range(0, len(found), len(numbers))]

    def _episodes_of(self, rule: GrowthRule, numbers: range) -> list[PlanEpisode]:
        seeds = [self._pool.episode_seed(RULE_STREAM, self._settings.seed, number) for number in numbers]
        return [PlanEpisode(rule.plan(self._context, self._pool.slot_names(seed)), seed) for seed in seeds]

    def _outcome(self, choice: RuleChoice[GrowthRule]) -> RuleOutcome:
        tried = [each for rules, numbers in choice.tried for rule in rules for each in self._episodes_of(rule, numbers)]
        description = choice.option.describe(self._context)
        return RuleOutcome(choice.option, description, choice.score, *self._episodes.cost(tried), choice.tasks)
