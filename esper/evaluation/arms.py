"""The arms of a comparison: what each one is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from esper.evaluation.arm_context import ArmContext, CreateJobs
from esper.evaluation.arm_jobs import (
    all_seeds_jobs,
    best_fixed_jobs,
    best_open_loop_jobs,
    chosen_jobs,
    full_jobs,
    grow_once_jobs,
    net2net_jobs,
    none_jobs,
    placebo_jobs,
    random_rate_jobs,
    replay_jobs,
    rule_jobs,
    static_jobs,
)
from esper.evaluation.policy_jobs import blind_jobs, permuted_jobs, ppo_jobs, shuffled_jobs

__all__ = ["ARMS", "ORACLE", "Arm", "ArmContext", "CreateJobs", "arms_of_clock", "base_name", "default_arms", "get_arm"]

ArmClock = Literal["both", "batches", "budget"]
MOMENT = "a share of the budget between 0 and 1"  # numbers that some arms take after @
ORACLE = "oracle"  # the arm with the best plan that is known for each task
PREFIX = "a number of budgets of search.budgets"


@dataclass(frozen=True)
class Arm:
    """One arm of a comparison.

    Arguments:
        description: for the report
        create_jobs: the jobs that run its episodes
        needs: what its jobs depend on: nothing, `ckpt`, or `reference` for the finished episodes of that arm
        grows: False for static networks
        is_control: whether nobody would deploy it, because it is a control or knows more than it may
        clock: whether it exists with episodes of a number of batches, of a budget of FLOPs, or both
        has_search: whether a search chooses its plan
        number: what a number after @ in its name means; empty if it takes none
        numbered: creates the jobs of the arm with a name and its number
        replaced_by: the arm of a budget that takes its place
        is_default: whether `controllers=all` includes it
    """

    description: str
    create_jobs: CreateJobs
    needs: str = ""
    grows: bool = True
    is_control: bool = False
    clock: ArmClock = "both"
    has_search: bool = False
    number: str = ""
    numbered: Callable[[str, float], CreateJobs] | None = None
    replaced_by: str = ""
    is_default: bool = True


ARMS = {
    "none": Arm("the host without growth", none_jobs, grows=False),
    "none_lr": Arm(
        "the host without growth, with the learning rate that scored highest on other episode seeds",
        chosen_jobs("none_lr"), grows=False, clock="budget", has_search=True,
    ),
    "full": Arm("every slot filled with the default blueprint from the start", full_jobs, grows=False),
    "full_lr": Arm(
        "every slot filled from the start, with the learning rate that scored highest on other episode seeds",
        chosen_jobs("full_lr"), grows=False, clock="budget", has_search=True,
    ),
    "best_static": Arm(
        "the best network without growth: a successive-halving search over slots, blueprints and variants of the host; "
        "a number after @ is the search's cost in budgets of an episode",
        chosen_jobs("best_static"), grows=False, clock="budget", has_search=True, number=PREFIX,
        numbered=lambda name, _: chosen_jobs(name),
    ),
    "best_static_lr": Arm(
        "the same, with the learning rate that scored highest on other episode seeds",
        chosen_jobs("best_static_lr"), grows=False, clock="budget", has_search=True,
    ),
    "static_final": Arm(
        "the reference's final network, trained from scratch for the same steps or the same budget",
        static_jobs("static_final", grown=True, matched=False), "reference", grows=False,
    ),
    "static_final_flops": Arm(
        "the reference's final network, trained from scratch for the FLOPs that the reference spent",
        static_jobs("static_final_flops", grown=True, matched=True), "reference", grows=False, clock="batches",
        replaced_by="static_final",
    ),
    "host_flops": Arm(
        "the host without growth, trained for the FLOPs that the reference spent",
        static_jobs("host_flops", grown=False, matched=True), "reference", grows=False, clock="batches",
        replaced_by="none",
    ),
    "all_seeds": Arm(
        "every slot filled from the start", all_seeds_jobs, grows=False, clock="batches", replaced_by="full"
    ),
    "grow_once": Arm(
        "every slot filled with the default blueprint at one moment; a number after @ is that moment, a share of the "
        "budget; without it, the best of five by a search",
        chosen_jobs("grow_once"), clock="budget", has_search=True, number=MOMENT, numbered=grow_once_jobs,
    ),
    "best_fixed": Arm(
        "the plan that is best on average over the training tasks of a distribution, from its shipped list",
        best_fixed_jobs, clock="budget",
    ),
    "net2net": Arm(
        "the host, widened at one moment without changing its function; the moment as in grow_once",
        chosen_jobs("net2net"), clock="budget", has_search=True, number=MOMENT, numbered=net2net_jobs,
    ),
    "schedule": Arm(
        "a fixed schedule; seeds are fossilised as soon as it is legal", rule_jobs("schedule", observes=False)
    ),
    "best_open_loop": Arm(
        "the best of many schedules, chosen by validation score on other episode seeds: a strong rule without feedback",
        best_open_loop_jobs, has_search=True,
    ),
    "gated": Arm(
        "the default blueprint everywhere; what does not contribute after a while is pruned",
        rule_jobs("gated", observes=True),
    ),
    "tuned_rule": Arm(
        "tries preferred blueprints in single slots, then plants the best one everywhere; its numbers can be tuned",
        rule_jobs("tuned_rule", observes=True),
    ),
    "heuristic": Arm("rules based on plateaus", rule_jobs("heuristic", observes=True)),
    "fragrow": Arm("growth at intervals that lengthen as the host overfits", rule_jobs("fragrow", observes=True)),
    "random": Arm("samples evenly from all legal actions", rule_jobs("random", observes=False)),
    "random_rate": Arm(
        "samples at random with the reference's frequency of each op: as much growth, at other steps and slots",
        random_rate_jobs, "reference",
    ),
    "replay": Arm(
        "repeats the reference's actions from another episode seed: a schedule without feedback",
        replay_jobs, "reference",
    ),
    "placebo": Arm(
        "every slot filled from the start with seeds that never learn (a negative control)",
        placebo_jobs, grows=False, is_control=True,
    ),
    "ppo": Arm("the learned controller", ppo_jobs, "ckpt"),
    "ppo_permuted": Arm(
        "the learned controller with the observation of another episode (a negative control)", permuted_jobs, "ckpt"
    ),
    "ppo_blind": Arm(
        "the learned controller with the mean of each feature in place of what it observes (a control)",
        blind_jobs, "ckpt", is_control=True, is_default=False,
    ),
    "ppo_shuffled": Arm(
        "the learned controller with the descriptors of blueprints shuffled among them (a control)",
        shuffled_jobs, "ckpt", is_control=True, is_default=False,
    ),
    ORACLE: Arm(
        "on each task of a distribution, the best plan that is known for it: of all searches, of the shipped list, of "
        "best_fixed, none and full",
        chosen_jobs(ORACLE), is_control=True, clock="budget", has_search=True,
    ),
}  # fmt: skip


def base_name(name: str) -> str:
    """The name of an arm without its number: grow_once of grow_once@0.25."""
    return name.partition("@")[0]


def get_arm(name: str) -> Arm:
    """An arm of the table, with the number in its name, or a user-defined controller."""
    base, _, number = name.partition("@")
    arm = ARMS.get(base)
    if arm is None:
        return Arm("a user-defined controller", rule_jobs(name, observes=True))
    if not number or arm.numbered is None:
        return arm
    return replace(arm, create_jobs=arm.numbered(name, float(number)), has_search=arm.number == PREFIX)


def arms_of_clock(is_budgeted: bool) -> dict[str, Arm]:
    """The arms that exist with a budget of FLOPs, or without."""
    absent = "batches" if is_budgeted else "budget"
    return {name: arm for name, arm in ARMS.items() if arm.clock != absent}


def default_arms(is_budgeted: bool) -> tuple[str, ...]:
    """The arms of an evaluation that names none."""
    if is_budgeted:
        return ("none", "full", "gated", "schedule", "heuristic", "random")
    return ("none", "random", "schedule", "heuristic", "all_seeds")
