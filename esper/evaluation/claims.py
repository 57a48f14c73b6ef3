"""Comparisons of the reference with every other arm, and what is claimed from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from esper.evaluation.arms import ORACLE
from esper.evaluation.results import ArmResults, TaskResults, paired_values
from esper.evaluation.statistics import MIN_UNITS, SIGNIFICANCE, Estimate, Strata, holm, paired_difference

NO_DIFFERENCE, TOO_FEW = "no significant difference", "too few episode seeds"
FEW_SEEDS_NOTE = (
    f"With fewer than {MIN_UNITS} episode seeds, an interval is little more than the range of the values; no "
    "difference is claimed."
)


@dataclass(frozen=True)
class ArmComparison:
    """The reference compared with another arm."""

    arm: str
    gap: Estimate  # of the scores on the same episode seeds, positive if the reference is better
    p_value: float  # adjusted for the number of comparisons, unless it is the primary one
    is_primary: bool
    strata: tuple[Strata, Strata]  # scores of the reference and of the arm, paired
    controllers: int | None  # trained ones, of whichever arm has fewer; None if neither has any
    over_controllers: Estimate | None = None  # if `gap` is of these controllers: with an interval over controllers too

    @property
    def episode_seeds(self) -> int:
        """Of all tasks."""
        return sum(scores.shape[-1] for scores in self.strata[0])

    @property
    def outcome(self) -> str:
        """For the reference: better, worse, or that no difference is claimed."""
        if self.episode_seeds < MIN_UNITS:
            return TOO_FEW
        if not self.p_value < SIGNIFICANCE:
            return NO_DIFFERENCE
        return "better" if self.gap.value > 0 else "worse"

    @property
    def is_claim(self) -> bool:
        return self.outcome not in (TOO_FEW, NO_DIFFERENCE)

    @property
    def claim(self) -> str:
        """The outcome, and which controllers it is about if they are too few for a claim about training runs."""
        scope = describe_scope(self.controllers)
        return f"{self.outcome}, {scope}" if scope and self.is_claim else self.outcome


def compare_arms(tasks: Sequence[TaskResults], main: str, primary: str | None = None) -> list[ArmComparison]:
    """The reference `main` compared with every other arm, over all tasks that have both.

    On MIN_UNITS tasks or more, fewer controllers than that are these controllers and no sample of others: intervals and
    p-values are over tasks and episode seeds. The comparison with `primary` was fixed beforehand and keeps its p-value;
    those of the others are adjusted (Holm). The oracle is no rival, as it is chosen on the task itself: see regret.
    """
    found = []
    for name in dict.fromkeys(name for task in tasks for name in task.arms if name not in (main, ORACLE)):
        with_both = [task.arms for task in tasks if {name, main} <= set(task.arms)]
        ours, theirs = [arms[main] for arms in with_both], [arms[name] for arms in with_both]
        strata = paired_values(ours, theirs)
        if strata[0]:
            gap, wider = paired_difference(*strata), None
            controllers = _count_controllers([*ours, *theirs])
            if are_few_controllers([*ours, *theirs], len(strata[0])):
                gap, wider = paired_difference(*strata, fixed_controllers=True), gap
            found.append(ArmComparison(name, gap, gap.p_value, name == primary, strata, controllers, wider))
    others = [comparison for comparison in found if not comparison.is_primary]
    adjusted = dict(zip((other.arm for other in others), holm([other.p_value for other in others]), strict=True))
    return [replace(comparison, p_value=adjusted.get(comparison.arm, comparison.p_value)) for comparison in found]


def are_few_controllers(arms: Sequence[ArmResults], tasks: int) -> bool:
    """Whether a result on this number of tasks is one of these controllers: too few to be a sample of others."""
    controllers = _count_controllers(arms)
    return tasks >= MIN_UNITS and controllers is not None and 1 < controllers < MIN_UNITS


def describe_scope(controllers: int | None) -> str:
    """Which controllers a claim is about; empty if it is about training runs in general, or if there are none."""
    if controllers is None or controllers >= MIN_UNITS:
        return ""
    return "of these controllers" if controllers > 1 else "of this controller"


def format_p_value(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def _count_controllers(arms: Sequence[ArmResults]) -> int | None:
    counts = [len(results.checkpoints) for results in arms if results.checkpoints != [None]]
    return min(counts, default=None)
