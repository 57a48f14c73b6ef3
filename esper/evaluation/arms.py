"""The arms of a comparison: what each one is, and the jobs that run its episodes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from esper.evaluation.runner import EpisodeJob, digest
from esper.lifecycle import Blend
from esper.records import EpisodeRecord

FILL_BLUEPRINTS = ("conv_light", "mlp_small")  # of all_seeds and placebo: the first that fits the host


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
        best_schedule: the result of the schedule search; None before the search
        recorded_actions: actions of a recorded episode for `replay`; None uses the reference's episodes
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


def _rule(arm: str) -> CreateJobs:
    """A hand-written controller."""
    return lambda context: context.job_per_seed(arm, context.build_rule(arm), context.settings(arm))


def _filled(arm: str, *, frozen: bool) -> CreateJobs:
    """Every slot is filled from the start; frozen seeds never learn."""

    def create_jobs(context: ArmContext) -> list[EpisodeJob]:
        space = context.environment.space
        blueprint = next((name for name in FILL_BLUEPRINTS if name in space.blueprints), space.blueprints[0])
        start = EpisodeStart(fossils=dict.fromkeys(space.slots, (blueprint, Blend.ADD.name)), frozen=frozen)
        return context.job_per_seed(arm, context.no_growth(), None, start)

    return create_jobs


def _ppo(context: ArmContext) -> list[EpisodeJob]:
    """Controllers with different tasks or training settings are separate arms."""
    inputs = {label: digest([weights, context.settings("ppo")]) for label, weights in context.weights.items()}
    variants = {label: context.training_digests.get(label, "") for label in context.policies}
    return [
        EpisodeJob("ppo", label, (episode_seed,), policy, EpisodeStart(), inputs[label], variants[label])
        for label, policy in context.policies.items()
        for episode_seed in context.episode_seeds
    ]


def _permuted(context: ArmContext) -> list[EpisodeJob]:
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


def _static(arm: str, *, grown: bool, matched: bool) -> CreateJobs:
    """A network that does not grow.

    Arguments:
        arm: its name
        grown: whether it has the reference's fossils
        matched: whether it trains for the reference's FLOPs instead of its steps
    """

    def create_jobs(context: ArmContext) -> list[EpisodeJob]:
        jobs = []
        for episode in context.reference:
            fossils = episode.fossils if grown else {}
            batches = context.environment.batches_for(episode.flops, fossils, episode.episode_seed) if matched else None
            start, variant = EpisodeStart(fossils=fossils, batches=batches), _derived_variant(episode)
            inputs = digest([variant, start.to_dict()])
            jobs.append(
                EpisodeJob(
                    arm, episode.checkpoint, (episode.episode_seed,), context.no_growth(), start, inputs, variant
                )
            )
        return jobs

    return create_jobs


def _random_rate(context: ArmContext) -> list[EpisodeJob]:
    environment, jobs = context.environment, []
    for label, episodes in context.reference_by_checkpoint().items():
        ops = Counter(step.action["op"] for episode in episodes for step in episode.steps)
        frequencies = {op: count / len(episodes) for op, count in ops.items()}
        rates = calibrate_rates(environment.space, environment.rules, environment.steps, frequencies)
        controller, variant = RandomController(environment.space, rates), _derived_variant(episodes[0])
        inputs = digest([variant, frequencies])
        jobs += [
            EpisodeJob("random_rate", label, (episode_seed,), controller, EpisodeStart(), inputs, variant)
            for episode_seed in context.episode_seeds
        ]
    return jobs


def _replay(context: ArmContext) -> list[EpisodeJob]:
    """Episode seeds in pairs exchange the reference's actions; an odd last one uses those of the seed before it."""
    space = context.environment.space
    if context.recorded_actions is not None:
        controller = ReplayController(space, context.recorded_actions)
        return context.job_per_seed("replay", controller, context.recorded_actions)
    jobs = []
    for label, episodes in context.reference_by_checkpoint().items():
        for index, episode in enumerate(episodes):
            other = episodes[index - 1 if index % 2 or index + 1 == len(episodes) else index + 1]
            actions, variant = [step.action for step in other.steps], _derived_variant(other)
            controller, inputs = ReplayController(space, actions), digest([variant, actions])
            jobs.append(
                EpisodeJob("replay", label, (episode.episode_seed,), controller, EpisodeStart(), inputs, variant)
            )
    return jobs


def _best_open_loop(context: ArmContext) -> list[EpisodeJob]:
    assert context.best_schedule is not None
    controller = ScheduleController(context.environment.space, context.best_schedule)
    return context.job_per_seed("best_open_loop", controller, [asdict(entry) for entry in context.best_schedule])


@dataclass(frozen=True)
class Arm:
    """One arm of a comparison.

    Arguments:
        description: for the report
        create_jobs: the jobs that run its episodes
        needs: what its jobs depend on: nothing, `ckpt`, or `reference` for the finished episodes of that arm
        grows: False for static networks
        is_control: whether it is a negative control, which nobody would deploy
    """

    description: str
    create_jobs: CreateJobs
    needs: str = ""
    grows: bool = True
    is_control: bool = False


ARMS = {
    "none": Arm("the host without growth", _rule("none"), grows=False),
    "static_final": Arm(
        "the reference's final network, trained from scratch for the same steps: equal parameters",
        _static("static_final", grown=True, matched=False), "reference", grows=False,
    ),
    "static_final_flops": Arm(
        "the reference's final network, trained from scratch for the FLOPs that the reference spent",
        _static("static_final_flops", grown=True, matched=True), "reference", grows=False,
    ),
    "host_flops": Arm(
        "the host without growth, trained for the FLOPs that the reference spent",
        _static("host_flops", grown=False, matched=True), "reference", grows=False,
    ),
    "all_seeds": Arm("every slot filled from the start", _filled("all_seeds", frozen=False), grows=False),
    "schedule": Arm("a fixed schedule; seeds are fossilised as soon as it is legal", _rule("schedule")),
    "best_open_loop": Arm(
        "the best of many random schedules (as many as the learned controllers had training episodes, unless a remark "
        "gives another number), chosen by validation score on other episode seeds: a strong rule without feedback",
        _best_open_loop,
    ),
    "heuristic": Arm("rules based on plateaus", _rule("heuristic")),
    "fragrow": Arm("growth at intervals that lengthen as the host overfits", _rule("fragrow")),
    "random": Arm("samples evenly from all legal actions", _rule("random")),
    "random_rate": Arm(
        "samples at random with the reference's frequency of each op: as much growth, at other steps and slots",
        _random_rate, "reference",
    ),
    "replay": Arm(
        "repeats the reference's actions from another episode seed: a schedule without feedback", _replay, "reference"
    ),
    "placebo": Arm(
        "every slot filled from the start with seeds that never learn (a negative control)",
        _filled("placebo", frozen=True), grows=False, is_control=True,
    ),
    "ppo": Arm("the learned controller", _ppo, "ckpt"),
    "ppo_permuted": Arm(
        "the learned controller with the observation of another episode (a negative control)", _permuted, "ckpt"
    ),
}  # fmt: skip


def get_arm(name: str) -> Arm:
    """An arm of the table, or a user-defined controller."""
    return ARMS.get(name) or Arm("a user-defined controller", _rule(name))


DEFAULT_ARMS = ("none", "random", "schedule", "heuristic", "all_seeds")
