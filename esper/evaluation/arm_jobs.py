"""The jobs that run the episodes of each arm."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from esper.controllers import RandomController, ReplayController, ScheduleController, calibrate_rates
from esper.environment import EpisodeStart
from esper.evaluation.arm_context import ArmContext, CreateJobs
from esper.evaluation.plans import Plan, fill, first_blueprint
from esper.evaluation.runner import EpisodeJob, digest
from esper.records import EpisodeRecord

FILL_BLUEPRINTS = ("conv_light", "mlp_small")  # of all_seeds, and of placebo without a budget: the first that fits


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
    plan, pool = context.fixed_plan, context.environment.host_pool
    plans = {seed: context.plan_of_fixed(plan, pool.slot_names(seed)) for seed in context.episode_seeds}
    return context.jobs_of_plans("best_fixed", plans)


def net2net_jobs(arm: str, moment: float) -> CreateJobs:
    """The host widened at a share of the budget."""
    return lambda context: context.plan_jobs(arm, context.widened_plan(moment))


def chosen_jobs(arm: str) -> CreateJobs:
    """The plan that a search has chosen for an arm, on each task."""

    def create_jobs(context: ArmContext) -> list[EpisodeJob]:
        names = {seed: context.environment.host_pool.host_name(seed) for seed in context.episode_seeds}
        return context.jobs_of_plans(arm, {seed: context.plans[arm][name] for seed, name in names.items()})

    return create_jobs


def best_open_loop_jobs(context: ArmContext) -> list[EpisodeJob]:
    if context.is_budgeted:
        return chosen_jobs("best_open_loop")(context)
    assert context.best_schedule is not None
    controller = ScheduleController(context.environment.space, context.best_schedule)
    return context.job_per_seed("best_open_loop", controller, [asdict(entry) for entry in context.best_schedule])


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
            task = context.environment.host_pool.host_name(episode.episode_seed)
            plan = context.plans.get(episode.arm, {}).get(task)
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
