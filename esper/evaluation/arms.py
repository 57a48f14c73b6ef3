"""The arms of a comparison: what each is, what it controls for, and the episodes it plays."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from esper.controllers import Chance, Controller, Entry, Learned, Nothing, Permuted, Replay, Schedule, calibrated_rates
from esper.environment import Environment, Start
from esper.evaluation.runner import Job, digest
from esper.lifecycle import Blend

USUAL = ("conv_light", "mlp_small")  # what fills every slot: the first that the host can have


@dataclass
class Bench:
    """All that arms are made of.

    Arguments:
        environment: where they play
        seeds: of the episodes, the same for each arm
        rule: builds a hand-written controller by the name of its arm
        settings: what that controller is built from, as plain data
        learners: trained controllers by their label
        weights: a digest of each of them
        ways: a digest of what each of them was trained on, and how
        reference: finished episodes of the arm that others are made from
        timetable: what a search for a schedule has found; None before
        repeated: actions of a recorded episode that `replay` repeats; None is those of the reference
    """

    environment: Environment
    seeds: Sequence[int]
    rule: Callable[[str], Controller[Any]]
    settings: Callable[[str], object]
    learners: Mapping[str, Learned] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    ways: Mapping[str, str] = field(default_factory=dict)
    reference: list[Mapping[str, Any]] = field(default_factory=list)
    timetable: Sequence[Entry] | None = None
    repeated: Sequence[Mapping[str, str]] | None = None

    def each(self, arm: str, controller: Controller[Any], made_from: object, start: Start | None = None) -> list[Job]:
        """The same for every seed, by no trained controller."""
        how = Start() if start is None else start
        rule = digest([made_from, how.told()])
        return [Job(arm, None, (seed,), controller, how, rule, rule) for seed in self.seeds]

    def still(self) -> Nothing:
        return Nothing(self.environment.space)

    def reference_by_learner(self) -> dict[str | None, list[Mapping[str, Any]]]:
        """Its episodes in the order of the seeds."""
        found: dict[str | None, list[Mapping[str, Any]]] = {}
        for line in sorted(self.reference, key=lambda line: self.seeds.index(line["seed"])):
            found.setdefault(line["learner"], []).append(line)
        return found


def _made_from(line: Mapping[str, Any]) -> str:
    """What tells arms apart that are made from unlike references: the reference's own rule."""
    return digest([line["controller"], line["rule"]])


def _rule(arm: str) -> Callable[[Bench], list[Job]]:
    return lambda bench: bench.each(arm, bench.rule(arm), bench.settings(arm))


def _filled(arm: str, *, frozen: bool) -> Callable[[Bench], list[Job]]:
    """Every slot is filled from the start."""

    def jobs(bench: Bench) -> list[Job]:
        space = bench.environment.space
        blueprint = next((name for name in USUAL if name in space.blueprints), space.blueprints[0])
        start = Start(fossils=dict.fromkeys(space.slots, (blueprint, Blend.ADD.name)), frozen=frozen)
        return bench.each(arm, bench.still(), None, start)

    return jobs


def _ppo(bench: Bench) -> list[Job]:
    """Controllers that were trained on unlike tasks, or in unlike ways, are arms of their own."""
    made = {label: digest([weights, bench.settings("ppo")]) for label, weights in bench.weights.items()}
    return [
        Job("ppo", label, (seed,), learned, Start(), made[label], bench.ways.get(label, ""))
        for label, learned in bench.learners.items()
        for seed in bench.seeds
    ]


def _permuted(bench: Bench) -> list[Job]:
    """In pairs, so that it does not depend on how many play at once; an odd one is shown the first, for it alone."""
    seeds = list(bench.seeds)
    pairs = [(seeds[index : index + 2] + seeds[:1])[:2] for index in range(0, len(seeds), 2)]
    jobs = []
    for label, learned in bench.learners.items():
        for index, pair in enumerate(pairs):
            way = bench.ways.get(label, "")
            origin = digest([bench.weights[label], bench.settings("ppo"), way, pair])
            recorded = min(2, len(seeds) - 2 * index)
            jobs.append(Job("ppo_permuted", label, tuple(pair), Permuted(learned), Start(), origin, way, recorded))
    return jobs


def _static(arm: str, *, grown: bool, matched: bool) -> Callable[[Bench], list[Job]]:
    """A network that does not grow: as the reference ended or bare, for its steps or for its FLOPs."""

    def jobs(bench: Bench) -> list[Job]:
        found = []
        for line in bench.reference:
            kept = {slot: (blueprint, blend) for slot, (blueprint, blend) in line["fossils"].items()} if grown else {}
            batches = bench.environment.batches_for(line["flops"], kept, line["seed"]) if matched else None
            start = Start(fossils=kept, batches=batches)
            origin = digest([_made_from(line), start.told()])
            found.append(Job(arm, line["learner"], (line["seed"],), bench.still(), start, origin, _made_from(line)))
        return found

    return jobs


def _random_rate(bench: Bench) -> list[Job]:
    environment, jobs = bench.environment, []
    for label, lines in bench.reference_by_learner().items():
        ops = Counter(step["action"]["op"] for line in lines for step in line["steps"])
        wanted = {op: count / len(lines) for op, count in ops.items()}
        rates = calibrated_rates(environment.space, environment.rules, environment.steps, wanted)
        chance, origin = Chance(environment.space, rates), digest([_made_from(lines[0]), wanted])
        jobs += [
            Job("random_rate", label, (seed,), chance, Start(), origin, _made_from(lines[0])) for seed in bench.seeds
        ]
    return jobs


def _replay(bench: Bench) -> list[Job]:
    """Seeds in pairs are given what the reference did on the other; an odd one what it did on the one before."""
    space = bench.environment.space
    if bench.repeated is not None:
        return bench.each("replay", Replay(space, bench.repeated), bench.repeated)
    jobs = []
    for label, lines in bench.reference_by_learner().items():
        for index, line in enumerate(lines):
            other = lines[index - 1 if index % 2 or index + 1 == len(lines) else index + 1]
            actions = [step["action"] for step in other["steps"]]
            origin = digest([_made_from(other), actions])
            jobs.append(
                Job("replay", label, (line["seed"],), Replay(space, actions), Start(), origin, _made_from(other))
            )
    return jobs


def _best_open_loop(bench: Bench) -> list[Job]:
    assert bench.timetable is not None
    made_from = [asdict(entry) for entry in bench.timetable]
    return bench.each("best_open_loop", Schedule(bench.environment.space, bench.timetable), made_from)


@dataclass(frozen=True)
class Arm:
    """`after` says what must be there before its episodes can be named: nothing, a checkpoint, the reference's.

    `grows` is false for networks that stay what they are; `control` is true for what nobody would use.
    """

    meaning: str
    jobs: Callable[[Bench], list[Job]]
    after: str = ""
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
    "schedule": Arm("a fixed timetable, fossilised as soon as legal", _rule("schedule")),
    "best_open_loop": Arm(
        "the best of many random timetables (as many as the learned controllers had episodes to learn from, unless "
        "remarked), chosen by validation on other seeds, an episode each: a strong rule that does not look",
        _best_open_loop,
    ),
    "heuristic": Arm("plateau rules", _rule("heuristic")),
    "fragrow": Arm("growth at intervals that lengthen as the host overfits", _rule("fragrow")),
    "random": Arm("even chance over all legal actions", _rule("random")),
    "random_rate": Arm(
        "chance with the reference's frequency of each op: how much, without when and where", _random_rate, "reference"
    ),
    "replay": Arm(
        "what the reference did on another seed, repeated: a mere schedule, without feedback", _replay, "reference"
    ),
    "placebo": Arm(
        "every slot filled from the start with seeds that never learn (a negative control)",
        _filled("placebo", frozen=True), grows=False, control=True,
    ),
    "ppo": Arm("the learned controller", _ppo, "ckpt"),
    "ppo_permuted": Arm("the learned controller, shown another episode (a negative control)", _permuted, "ckpt"),
}  # fmt: skip


def arm_of(name: str) -> Arm:
    """An arm of the table, or a controller of the user's own."""
    return ARMS.get(name) or Arm("a controller of the user's own", _rule(name))


USUALLY = ("none", "random", "schedule", "heuristic", "all_seeds")
