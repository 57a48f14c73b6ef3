"""The arms of a comparison: what each is, what it controls for, and its episodes."""

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

FILLED_WITH = ("conv_light", "mlp_small")  # blueprint of every slot: the first that fits the host


@dataclass
class ArmContext:
    """What arms create their jobs from.

    Arguments:
        environment: that episodes run in
        episode_seeds: the same for each arm
        build_rule: builds a hand-written controller by the name of its arm
        settings: the configuration of that controller, as plain data
        policies: trained controllers by label
        weights: digest of each policy's weights and of its mode
        training_digests: digest of each trained controller's task and training settings
        reference: finished episodes of the reference arm
        best_schedule: the result of the schedule search; None before it ran
        recorded: actions of a recorded episode for `replay`; None uses the reference's episodes
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
    recorded: Sequence[Mapping[str, str]] | None = None

    def job_per_seed(
        self, arm: str, controller: Controller[Any], inputs: object, start: EpisodeStart | None = None
    ) -> list[EpisodeJob]:
        """One job for each episode seed, without a trained controller."""
        begin = EpisodeStart() if start is None else start
        variant = digest([inputs, begin.to_dict()])
        return [EpisodeJob(arm, None, (seed,), controller, begin, variant, variant) for seed in self.episode_seeds]

    def no_growth(self) -> NoGrowth:
        return NoGrowth(self.environment.space)

    def reference_by_checkpoint(self) -> dict[str | None, list[EpisodeRecord]]:
        """The reference's episodes in the order of the episode seeds."""
        found: dict[str | None, list[EpisodeRecord]] = {}
        for line in sorted(self.reference, key=lambda line: self.episode_seeds.index(line.episode_seed)):
            found.setdefault(line.checkpoint, []).append(line)
        return found


def _derived_variant(line: EpisodeRecord) -> str:
    """Keeps arms apart that are derived from different references."""
    return digest([line.arm, line.variant])


def _rule(arm: str) -> Callable[[ArmContext], list[EpisodeJob]]:
    return lambda context: context.job_per_seed(arm, context.build_rule(arm), context.settings(arm))


def _filled(arm: str, *, frozen: bool) -> Callable[[ArmContext], list[EpisodeJob]]:
    """Every slot is filled from the start."""

    def jobs(context: ArmContext) -> list[EpisodeJob]:
        space = context.environment.space
        blueprint = next((name for name in FILLED_WITH if name in space.blueprints), space.blueprints[0])
        start = EpisodeStart(fossils=dict.fromkeys(space.slots, (blueprint, Blend.ADD.name)), frozen=frozen)
        return context.job_per_seed(arm, context.no_growth(), None, start)

    return jobs


def _ppo(context: ArmContext) -> list[EpisodeJob]:
    """Controllers with different tasks or training settings are separate arms."""
    inputs = {label: digest([weights, context.settings("ppo")]) for label, weights in context.weights.items()}
    return [
        EpisodeJob(
            "ppo", label, (seed,), policy, EpisodeStart(), inputs[label], context.training_digests.get(label, "")
        )
        for label, policy in context.policies.items()
        for seed in context.episode_seeds
    ]


def _permuted(context: ArmContext) -> list[EpisodeJob]:
    """In pairs, so that it does not depend on `environment.envs`; with an odd number, the last is paired with the first."""
    seeds = list(context.episode_seeds)
    pairs = [(seeds[index : index + 2] + seeds[:1])[:2] for index in range(0, len(seeds), 2)]
    jobs = []
    for label, policy in context.policies.items():
        variant, controller = context.training_digests.get(label, ""), PermutedPolicyController(policy)
        for index, pair in enumerate(pairs):
            inputs = digest([context.weights[label], context.settings("ppo"), variant, pair])
            recorded = min(2, len(seeds) - 2 * index)
            jobs.append(
                EpisodeJob("ppo_permuted", label, tuple(pair), controller, EpisodeStart(), inputs, variant, recorded)
            )
    return jobs


def _static(arm: str, *, grown: bool, matched: bool) -> Callable[[ArmContext], list[EpisodeJob]]:
    """A network that does not grow: as the reference ended or bare, for its steps or for its FLOPs."""

    def jobs(context: ArmContext) -> list[EpisodeJob]:
        found = []
        for line in context.reference:
            fossils = line.fossils if grown else {}
            batches = context.environment.batches_for(line.flops, fossils, line.episode_seed) if matched else None
            start, variant = EpisodeStart(fossils=fossils, batches=batches), _derived_variant(line)
            inputs = digest([variant, start.to_dict()])
            found.append(
                EpisodeJob(arm, line.checkpoint, (line.episode_seed,), context.no_growth(), start, inputs, variant)
            )
        return found

    return jobs


def _random_rate(context: ArmContext) -> list[EpisodeJob]:
    environment, jobs = context.environment, []
    for label, lines in context.reference_by_checkpoint().items():
        ops = Counter(step.action["op"] for line in lines for step in line.steps)
        wanted = {op: count / len(lines) for op, count in ops.items()}
        rates = calibrate_rates(environment.space, environment.rules, environment.steps, wanted)
        controller, variant = RandomController(environment.space, rates), _derived_variant(lines[0])
        inputs = digest([variant, wanted])
        jobs += [
            EpisodeJob("random_rate", label, (seed,), controller, EpisodeStart(), inputs, variant)
            for seed in context.episode_seeds
        ]
    return jobs


def _replay(context: ArmContext) -> list[EpisodeJob]:
    """Episode seeds in pairs exchange the reference's actions; an odd last one uses those of the seed before it."""
    space = context.environment.space
    if context.recorded is not None:
        return context.job_per_seed("replay", ReplayController(space, context.recorded), context.recorded)
    jobs = []
    for label, lines in context.reference_by_checkpoint().items():
        for index, line in enumerate(lines):
            other = lines[index - 1 if index % 2 or index + 1 == len(lines) else index + 1]
            actions, variant = [step.action for step in other.steps], _derived_variant(other)
            controller, inputs = ReplayController(space, actions), digest([variant, actions])
            jobs.append(EpisodeJob("replay", label, (line.episode_seed,), controller, EpisodeStart(), inputs, variant))
    return jobs


def _best_open_loop(context: ArmContext) -> list[EpisodeJob]:
    assert context.best_schedule is not None
    controller = ScheduleController(context.environment.space, context.best_schedule)
    return context.job_per_seed("best_open_loop", controller, [asdict(entry) for entry in context.best_schedule])


@dataclass(frozen=True)
class Arm:
    """One arm of a comparison.

    `needs` is what its jobs depend on: nothing, `ckpt`, or `reference` for the finished episodes of that arm.

    `grows` is false for static networks; `control` marks negative controls, which nobody would deploy.
    """

    meaning: str
    jobs: Callable[[ArmContext], list[EpisodeJob]]
    needs: str = ""
    grows: bool = True
    control: bool = False


ARMS = {
    "none": Arm("the host alone", _rule("none"), grows=False),
    "static_final": Arm(
        "what the reference ended with, from scratch, for the same steps: matched parameters",
        _static("static_final", grown=True, matched=False), "reference", grows=False,
    ),
    "static_final_flops": Arm(
        "the same, for the FLOPs that the reference spent",
        _static("static_final_flops", grown=True, matched=True), "reference", grows=False,
    ),
    "host_flops": Arm(
        "the bare host, trained longer, for the FLOPs that the reference spent",
        _static("host_flops", grown=False, matched=True), "reference", grows=False,
    ),
    "all_seeds": Arm("every slot filled from the start", _filled("all_seeds", frozen=False), grows=False),
    "schedule": Arm("a fixed schedule, fossilised as soon as legal", _rule("schedule")),
    "best_open_loop": Arm(
        "the best of many random schedules (as many as the learned controllers had training episodes, unless a remark "
        "gives another number), chosen by validation on other episode seeds: a strong rule without feedback",
        _best_open_loop,
    ),
    "heuristic": Arm("plateau rules", _rule("heuristic")),
    "fragrow": Arm("growth at intervals that lengthen as the host overfits", _rule("fragrow")),
    "random": Arm("uniform over all legal actions", _rule("random")),
    "random_rate": Arm(
        "random, with the reference's frequency of each op: how much, without when and where", _random_rate, "reference"
    ),
    "replay": Arm(
        "the reference's actions on another episode seed, repeated: a schedule without feedback", _replay, "reference"
    ),
    "placebo": Arm(
        "every slot filled from the start with seeds that never learn (a negative control)",
        _filled("placebo", frozen=True), grows=False, control=True,
    ),
    "ppo": Arm("the learned controller", _ppo, "ckpt"),
    "ppo_permuted": Arm("the learned controller with the observation of another episode (a negative control)", _permuted, "ckpt"),
}  # fmt: skip


def get_arm(name: str) -> Arm:
    """An arm of the table, or a controller of the user's own."""
    return ARMS.get(name) or Arm("a controller of the user's own", _rule(name))


DEFAULT_ARMS = ("none", "random", "schedule", "heuristic", "all_seeds")
