"""The jobs that run the episodes of each arm."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from esper.controllers import (
    Controller,
    NoGrowth,
    PermutedPolicyController,
    PolicyController,
    RandomController,
    ReplayController,
    ScheduleController,
    ScheduleEntry,
    calibrate_rates,
)
from esper.environment import Environment, EpisodeStart
from esper.evaluation.plans import Plan, fill, first_blueprint
from esper.evaluation.runner import EpisodeJob, digest
from esper.records import EpisodeRecord
from esper.tasks import FixedPlan

FILL_BLUEPRINTS = ("conv_light", "mlp_small")  # of all_seeds, and of placebo without a budget: the first that fits


@dataclass
class ArmContext:
    """Everything that arms create their jobs from.

    Arguments:
        environment: that episodes run in
        episode_seeds: the same for each arm
        build_rule: builds a hand-written controller by the name of its arm
        settings: returns the configuration of that controller as plain data
        policies: trained controllers by label
        weights: by label, the digest of a policy's weights and whether it acts greedily or samples
        training_digests: by label, the digest of a trained controller's task and training settings
        reference: finished episodes of the reference arm
        best_schedule: the result of the schedule search without a budget; None before the search
        recorded_actions: actions of a recorded episode for `replay`; None uses the reference's episodes
        blueprint: of arms that fill all slots, in order of preference
        net2net_host: variant of the host that net2net widens it to
        plans: that searches have chosen, by arm
        fixed_plan: that is best on average over the training tasks, if it is known
    """

    environment: Environment
    episode_seeds: Sequence[int]
    build_rule: Callable[[str], Controller[Any]]
    settings: Callable[[str], object]
    policies: Mapping[str, PolicyController] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    training_digests: Mapping[str, str] = field(default_factory=dict)
    reference: list[EpisodeRecord] = field(default_factory=list)
    best_schedule: Sequence[ScheduleEntry] | None = None
    recorded_actions: Sequence[Mapping[str, str]] | None = None
    blueprint: Sequence[str] = ()
    net2net_host: str = ""
    plans: dict[str, Plan] = field(default_factory=dict)
    fixed_plan: FixedPlan | None = None

    @property
    def is_budgeted(self) -> bool:
        """Whether episodes have a budget of FLOPs instead of a number of batches."""
        return self.environment.is_budgeted

    @property
    def blind_start(self) -> EpisodeStart:
        """The start of an arm that looks at no measurement, so that it pays for none under a budget.

        A gate of the lifecycle that requires a contribution needs it to be measured in every arm.
        """
        gates = self.environment.rules.gates.values()
        return EpisodeStart(measured=not self.is_budgeted or any(gate.contribution is not None for gate in gates))

    def job_per_seed(
        self, arm: str, controller: Controller[Any], inputs: object, start: EpisodeStart | None = None
    ) -> list[EpisodeJob]:
        """One job for each episode seed, without a trained controller."""
        episode_start = EpisodeStart() if start is None else start
        variant = digest([inputs, episode_start.to_dict()])
        return [
            EpisodeJob(arm, None, (episode_seed,), controller, episode_start, variant, variant)
            for episode_seed in self.episode_seeds
        ]

    def plan_jobs(self, arm: str, plan: Plan) -> list[EpisodeJob]:
        """One job for each episode seed, of an arm that follows a plan."""
        controller = plan.controller(self.environment.space, self.environment.rules)
        return [
            EpisodeJob(arm, None, (episode_seed,), controller, plan.start, plan.digest, plan.digest)
            for episode_seed in self.episode_seeds
        ]

    def filled_plan(self, **changes: Any) -> Plan:
        """Every slot filled with the default blueprint; `changes` are other fields of the start."""
        space = self.environment.space
        fossils = fill(space, first_blueprint(self.blueprint, space))
        return Plan(replace(self.blind_start, fossils=fossils, **changes))

    def widened_plan(self, moment: float) -> Plan:
        """The host, widened once."""
        return Plan(replace(self.blind_start, widen=self.net2net_host, at=moment))

    def no_growth(self) -> NoGrowth:
        return NoGrowth(self.environment.space)

    def reference_by_checkpoint(self) -> dict[str | None, list[EpisodeRecord]]:
        """The reference's episodes in the order of the episode seeds."""
        by_checkpoint: dict[str | None, list[EpisodeRecord]] = {}
        for episode in sorted(self.reference, key=lambda episode: self.episode_seeds.index(episode.episode_seed)):
            by_checkpoint.setdefault(episode.checkpoint, []).append(episode)
        return by_checkpoint


CreateJobs = Callable[[ArmContext], list[EpisodeJob]]


def _derived_variant(episode: EpisodeRecord) -> str:
    """Distinguishes arms that are derived from different references."""
    return digest([episode.arm, episode.variant])


def rule_jobs(arm: str, *, observes: bool) -> CreateJobs:
    """A hand-written controller; whether it looks at measurements."""

    def create_jobs(context: ArmContext) -> list[EpisodeJob]:
        start = EpisodeStart() if observes else context.blind_start
        return context.job_per_seed(arm, context.build_rule(arm), context.settings(arm), start)

    return create_jobs


def none_jobs(context: ArmContext) -> list[EpisodeJob]:
    if context.is_budgeted:
        return context.plan_jobs("none", Plan(context.blind_start))
    return rule_jobs("none", observes=False)(context)


def all_seeds_jobs(context: ArmContext) -> list[EpisodeJob]:
    return context.job_per_seed("all_seeds", context.no_growth(), None, _fill_without_budget(context))


def placebo_jobs(context: ArmContext) -> list[EpisodeJob]:
    """Frozen seeds never learn."""
    if context.is_budgeted:
        return context.plan_jobs("placebo", context.filled_plan(frozen=True))
    start = replace(_fill_without_budget(context), frozen=True)
    return context.job_per_seed("placebo", context.no_growth(), None, start)


def _fill_without_budget(context: ArmContext) -> EpisodeStart:
    space = context.environment.space
    return EpisodeStart(fossils=fill(space, first_blueprint(FILL_BLUEPRINTS, space)))


def full_jobs(context: ArmContext) -> list[EpisodeJob]:
    return context.plan_jobs("full", context.filled_plan())


def grow_once_jobs(arm: str, moment: float) -> CreateJobs:
    """All slots filled at a share of the budget."""
    return lambda context: context.plan_jobs(arm, context.filled_plan(at=moment))


def best_fixed_jobs(context: ArmContext) -> list[EpisodeJob]:
    """The plan that is best on average over the training tasks."""
    assert context.fixed_plan is not None
    plan, variant = context.fixed_plan, digest(context.fixed_plan.to_dict())
    jobs = []
    for episode_seed in context.episode_seeds:
        fossils = plan.start(context.environment.host_pool.slot_names(episode_seed)).fossils
        start = replace(context.blind_start, fossils=fossils, at=plan.at)
        inputs = digest([variant, start.to_dict()])
        jobs.append(EpisodeJob("best_fixed", None, (episode_seed,), context.no_growth(), start, inputs, variant))
    return jobs


def net2net_jobs(arm: str, moment: float) -> CreateJobs:
    """The host widened at a share of the budget."""
    return lambda context: context.plan_jobs(arm, context.widened_plan(moment))


def chosen_jobs(arm: str) -> CreateJobs:
    """The plan that a search has chosen for an arm."""
    return lambda context: context.plan_jobs(arm, context.plans[arm])


def best_open_loop_jobs(context: ArmContext) -> list[EpisodeJob]:
    if context.is_budgeted:
        return chosen_jobs("best_open_loop")(context)
    assert context.best_schedule is not None
    controller = ScheduleController(context.environment.space, context.best_schedule)
    return context.job_per_seed("best_open_loop", controller, [asdict(entry) for entry in context.best_schedule])


def ppo_jobs(context: ArmContext) -> list[EpisodeJob]:
    """Controllers with different tasks or training settings are separate arms."""
    inputs = {label: digest([weights, context.settings("ppo")]) for label, weights in context.weights.items()}
    variants = {label: context.training_digests.get(label, "") for label in context.policies}
    return [
        EpisodeJob("ppo", label, (episode_seed,), policy, EpisodeStart(), inputs[label], variants[label])
        for label, policy in context.policies.items()
        for episode_seed in context.episode_seeds
    ]


def permuted_jobs(context: ArmContext) -> list[EpisodeJob]:
    """Episodes run in pairs, so that they do not depend on `environment.envs`; an odd last one runs with the first."""
    episode_seeds = list(context.episode_seeds)
    pairs = [(episode_seeds[index : index + 2] + episode_seeds[:1])[:2] for index in range(0, len(episode_seeds), 2)]
    jobs = []
    for label, policy in context.policies.items():
        variant, controller = context.training_digests.get(label, ""), PermutedPolicyController(policy)
        for index, pair in enumerate(pairs):
            inputs = digest([context.weights[label], context.settings("ppo"), variant, pair])
            count = min(2, len(episode_seeds) - 2 * index)
            jobs.append(
                EpisodeJob("ppo_permuted", label, tuple(pair), controller, EpisodeStart(), inputs, variant, count)
            )
    return jobs


def static_jobs(arm: str, *, grown: bool, matched: bool) -> CreateJobs:
    """A network that does not grow.

    Arguments:
        arm: its name
        grown: whether it has the reference's fossils
        matched: whether it trains for the reference's FLOPs instead of its steps, where episodes have no budget
    """

    def create_jobs(context: ArmContext) -> list[EpisodeJob]:
        jobs = []
        for episode in context.reference:
            fossils = episode.fossils if grown else {}
            batches = context.environment.batches_for(episode.flops, fossils, episode.episode_seed) if matched else None
            plan = context.plans.get(episode.arm)
            host = plan.start.final_host if plan and grown else None
            start = replace(context.blind_start, fossils=fossils, batches=batches, host=host)
            variant = _derived_variant(episode)
            inputs = digest([variant, start.to_dict()])
            jobs.append(
                EpisodeJob(
                    arm, episode.checkpoint, (episode.episode_seed,), context.no_growth(), start, inputs, variant
                )
            )
        return jobs

    return create_jobs


def random_rate_jobs(context: ArmContext) -> list[EpisodeJob]:
    environment, jobs = context.environment, []
    exists = environment.host_pool.exists(context.episode_seeds)
    for label, episodes in context.reference_by_checkpoint().items():
        ops = Counter(step.choice for episode in episodes for step in episode.steps)
        frequencies = {op: count / len(episodes) for op, count in ops.items()}
        rates = calibrate_rates(environment.space, environment.rules, environment.steps, frequencies, exists)
        controller, variant = RandomController(environment.space, rates), _derived_variant(episodes[0])
        inputs = digest([variant, frequencies])
        jobs += [
            EpisodeJob("random_rate", label, (episode_seed,), controller, context.blind_start, inputs, variant)
            for episode_seed in context.episode_seeds
        ]
    return jobs


def replay_jobs(context: ArmContext) -> list[EpisodeJob]:
    """Episode seeds in pairs exchange the reference's actions, among hosts with the same slots."""
    space = context.environment.space
    if context.recorded_actions is not None:
        controller = ReplayController(space, context.recorded_actions)
        return context.job_per_seed("replay", controller, context.recorded_actions, context.blind_start)
    jobs = []
    for label, episodes in context.reference_by_checkpoint().items():
        for episode in episodes:
            other = _find_partner(episode, episodes)
            actions, variant = [step.action for step in other.steps], _derived_variant(other)
            controller, inputs = ReplayController(space, actions), digest([variant, actions])
            jobs.append(
                EpisodeJob("replay", label, (episode.episode_seed,), controller, context.blind_start, inputs, variant)
            )
    return jobs


def _find_partner(episode: EpisodeRecord, episodes: Sequence[EpisodeRecord]) -> EpisodeRecord:
    """The other episode of a pair of neighbours; an odd last one has the one before it.

    The partner has the same host, unless no other episode has; then the same slots, which actions name.
    """
    same_host = [other for other in episodes if other.host == episode.host]
    same_slots = [other for other in episodes if other.slots == episode.slots]
    own = next((alike for alike in (same_host, same_slots) if len(alike) > 1), list(episodes))
    index = own.index(episode)
    return own[index - 1 if index % 2 or index + 1 == len(own) else index + 1]
