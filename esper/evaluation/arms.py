"""The arms of a comparison: what each is, what it controls for, and the episodes it plays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from esper.controllers import Chance, Controller, Entry, Learned, Nothing, Permuted, Replay, Schedule, fitted_rates
from esper.environment import Environment, Start
from esper.evaluation.runner import Job
from esper.lifecycle import Blend

USUAL = ("conv_light", "mlp_small")  # what fills every slot: the first that the host can have


@dataclass
class Bench:
    """All that arms are made of.

    Arguments:
        environment: where they play
        seeds: of the episodes, the same for each arm
        rule: builds a hand-written controller by the name of its arm
        learners: trained controllers by their label
        reference: finished episodes of the arm that others are made from
        timetable: what a search for a schedule has found
        repeated: actions of a recorded episode that `replay` repeats; None is those of the reference
    """

    environment: Environment
    seeds: Sequence[int]
    rule: Callable[[str], Controller[Any]]
    learners: Mapping[str, Learned]
    reference: list[Mapping[str, Any]] = field(default_factory=list)
    timetable: Sequence[Entry] = ()
    repeated: Sequence[Mapping[str, str]] | None = None

    def each(
        self, arm: str, controller: Controller[Any], learner: str | None = None, start: Start | None = None
    ) -> list[Job]:
        """The same for every seed."""
        how = Start() if start is None else start
        return [Job(arm, learner, (seed,), controller, how) for seed in self.seeds]

    def still(self) -> Nothing:
        return Nothing(self.environment.space)

    def reference_by_learner(self) -> dict[str | None, list[Mapping[str, Any]]]:
        """Its episodes in the order of the seeds."""
        found: dict[str | None, list[Mapping[str, Any]]] = {}
        for line in sorted(self.reference, key=lambda line: self.seeds.index(line["seed"])):
            found.setdefault(line["learner"], []).append(line)
        return found


def _rule(arm: str) -> Callable[[Bench], list[Job]]:
    return lambda bench: bench.each(arm, bench.rule(arm))


def _all_seeds(bench: Bench) -> list[Job]:
    space = bench.environment.space
    blueprint = next((name for name in USUAL if name in space.blueprints), space.blueprints[0])
    start = Start(fossils=dict.fromkeys(space.slots, (blueprint, Blend.ADD.name)))
    return bench.each("all_seeds", bench.still(), start=start)


def _ppo(bench: Bench) -> list[Job]:
    return [job for label, learned in bench.learners.items() for job in bench.each("ppo", learned, label)]


def _permuted(bench: Bench) -> list[Job]:
    """In pairs, so that it does not depend on how many play at once; an odd one joins the last pair."""
    seeds = list(bench.seeds)
    pairs = [seeds[index : index + 2] for index in range(0, len(seeds) - 1, 2)] or [seeds]
    if len(seeds) % 2 and len(seeds) > 1:
        pairs[-1].append(seeds[-1])
    return [
        Job("ppo_permuted", label, tuple(pair), Permuted(learned), Start())
        for label, learned in bench.learners.items()
        for pair in pairs
    ]


def _static(arm: str, *, grown: bool, matched: bool) -> Callable[[Bench], list[Job]]:
    """A network that does not grow: as the reference ended or bare, for its steps or for its FLOPs."""

    def jobs(bench: Bench) -> list[Job]:
        found = []
        for line in bench.reference:
            fossils = (
                {slot: (blueprint, blend) for slot, (blueprint, blend) in line["fossils"].items()} if grown else {}
            )
            batches = bench.environment.batches_for(line["flops"], fossils) if matched else None
            start = Start(fossils=fossils, batches=batches)
            found.append(Job(arm, line["learner"], (line["seed"],), bench.still(), start))
        return found

    return jobs


def _random_rate(bench: Bench) -> list[Job]:
    jobs = []
    for label, lines in bench.reference_by_learner().items():
        choices = [(step["legal"], step["action"]["op"]) for line in lines for step in line["steps"]]
        jobs += bench.each("random_rate", Chance(bench.environment.space, fitted_rates(choices)), label)
    return jobs


def _replay(bench: Bench) -> list[Job]:
    """Each seed is given what the reference did on the seed before it."""
    space = bench.environment.space
    if bench.repeated is not None:
        return bench.each("replay", Replay(space, bench.repeated))
    jobs = []
    for label, lines in bench.reference_by_learner().items():
        for before, line in zip([lines[-1], *lines[:-1]], lines, strict=True):
            actions = [step["action"] for step in before["steps"]]
            jobs.append(Job("replay", label, (line["seed"],), Replay(space, actions), Start()))
    return jobs


def _best_open_loop(bench: Bench) -> list[Job]:
    return bench.each("best_open_loop", Schedule(bench.environment.space, bench.timetable))


@dataclass(frozen=True)
class Arm:
    """`after` says what must be there before its episodes can be named: nothing, a checkpoint, the reference's."""

    meaning: str
    jobs: Callable[[Bench], list[Job]]
    after: str = ""


ARMS = {
    "none": Arm("the host alone", _rule("none")),
    "static_final": Arm(
        "what the reference ended with, from scratch, for the same steps: matched parameters",
        _static("static_final", grown=True, matched=False), "reference",
    ),
    "static_final_flops": Arm(
        "the same, for the FLOPs that the reference spent",
        _static("static_final_flops", grown=True, matched=True), "reference",
    ),
    "host_flops": Arm(
        "the bare host, trained longer, for the FLOPs that the reference spent",
        _static("host_flops", grown=False, matched=True), "reference",
    ),
    "all_seeds": Arm("every slot filled from the start", _all_seeds),
    "schedule": Arm("a fixed timetable, fossilised as soon as legal", _rule("schedule")),
    "best_open_loop": Arm(
        "the best of as many random timetables as the learned controllers had episodes to learn from, chosen by "
        "validation on other seeds: the strongest rule that does not look",
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
    "placebo": Arm("the fixed timetable with seeds that cannot help (a negative control)", _rule("placebo")),
    "ppo": Arm("the learned controller", _ppo, "ckpt"),
    "ppo_permuted": Arm("the learned controller, shown another episode (a negative control)", _permuted, "ckpt"),
}  # fmt: skip
USUALLY = ("none", "random", "schedule", "heuristic", "all_seeds")
