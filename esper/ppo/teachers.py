"""What a policy is cloned from: for each training task, the plans that won there, and trials that find them.

A plan of one task cannot be cloned as it is: at its start nothing shows which task it is, so a policy would learn how
often each plan wins. Trials can: they run the plans that win somewhere in the same order in every task, and end at the
one that wins in this task. A policy learns from what it observes during a trial whether to keep or to prune its seeds.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from esper.controllers import Policy, TrialController
from esper.environment import TaskOracle
from esper.environment.oracle_plans import Plans, no_growth, plan_scores
from esper.environment.oracle_tasks import SPLITS
from esper.lifecycle import ActionSpace, Rules
from esper.ppo.cloning import clone_actions, fold_observations, run_controller
from esper.ppo.collector import VectorEnv
from esper.ppo.module import UPDATE_PASSES
from esper.ppo.settings import PPOSettings
from esper.tasks import LEAST_GAIN, PLAN_MOMENTS, FixedPlan, KnownTask

CLONING_PURPOSE = "cloning"  # of the episode seeds
TRIAL_PLACES = ("last", "first", "middle")  # of seeds that are tried together; a host with one slot tries the first
ENOUGH = 0.8  # share of the best plan's gain that a plan needs so that no further one is tried

TaskGains = Mapping[int, Mapping[FixedPlan, float]]  # by task number: points of plans over no growth
Demonstration = tuple[tuple[FixedPlan, ...], float]  # plans that run in turn, and what the last one gains


@dataclass(frozen=True)
class Teacher:
    """What one episode demonstrates."""

    plans: tuple[FixedPlan, ...]  # run in turn; the last one stays
    weight: float  # of the episode's actions


def listed_gains(known: Mapping[int, KnownTask], blueprints: Sequence[str]) -> TaskGains:
    """The gains of listed plans that need these blueprints only; `known` is by task number."""
    gains = {}
    for number, task in known.items():
        if not task.none:
            continue  # listed, but not measured
        none = sum(task.none) / len(task.none)
        gains[number] = {
            each.plan: each.score - none
            for each in task.plans
            if all(blueprint in blueprints for _, blueprint in each.plan.blueprints)
        }
    return gains


def oracle_gains(oracle: TaskOracle) -> TaskGains:
    """The gains of each blueprint in all slots, at several moments, on the oracle's training tasks."""
    numbers, steps, names = SPLITS["train"], oracle.steps, oracle.space.blueprints
    tasks = oracle.tasks(numbers)
    empty = no_growth(tasks)
    none = plan_scores(tasks, empty, steps)
    gains: dict[int, dict[FixedPlan, float]] = {number: {} for number in numbers}
    for plan in (FixedPlan((("all", name),), at) for name in names for at in PLAN_MOMENTS):
        chosen = torch.where(tasks.exists, names.index(plan.blueprints[0][1]), -1)
        start = torch.full_like(empty.start, math.ceil(plan.at * steps))
        scores = plan_scores(tasks, Plans(chosen, start), steps)
        for number, gain in zip(numbers, (scores - none).tolist(), strict=True):
            gains[number][plan] = gain
    return gains


def choose_trials(gains: TaskGains, count: int) -> list[FixedPlan]:
    """At most `count` plans that together win most over all tasks, all at the start of an episode.

    The next one is always the one that adds most to the mean of the best gains. Trials take time, so they begin early.
    """
    shapes = {plan.blueprints for plans in gains.values() for plan in plans if plan.blueprints}
    chosen: list[FixedPlan] = []
    best = dict.fromkeys(gains, 0.0)
    while len(chosen) < count:
        added = {
            shape: sum(max(_gain_of(plans, shape) - best[number], 0.0) for number, plans in gains.items())
            for shape in sorted(shapes)
        }
        if not added or max(added.values()) <= 0:
            break
        shape = max(added, key=added.__getitem__)
        best = {number: max(best[number], _gain_of(plans, shape)) for number, plans in gains.items()}
        chosen.append(FixedPlan(shape))
    return chosen


def choose_teachers(gains: TaskGains, trials: int, *, together: bool = False) -> dict[int, list[Teacher]]:
    """What the episodes of each task demonstrate, by task number.

    With `trials`, that many plans at most run in turn until one has almost the gain of the best of them; all are pruned
    if none gains. With `together`, their blueprints run at the same time, each in a slot of its own, and then the best
    plan. Without trials, the best plans are demonstrated as they are, or the empty plan if none gains. The weight
    of a task is what it gains relative to the mean of tasks that gain, at least 1.
    """
    tried = choose_trials(gains, trials)
    run_trials = _try_together if together else _try_in_turn
    chosen: dict[int, list[Demonstration]] = {}
    for number, plans in gains.items():
        if trials:
            chosen[number] = [run_trials(plans, tried)]
        else:
            chosen[number] = _winners(plans)
    best = [max(gain for _, gain in each) for each in chosen.values()]
    mean = sum(best) / max(1, sum(gain > 0 for gain in best))
    return {
        number: [Teacher(plans, max(gain / mean, 1.0) if gain else 1.0) for plans, gain in each]
        for number, each in chosen.items()
    }


def _winners(plans: Mapping[FixedPlan, float]) -> list[Demonstration]:
    """Each plan that gains almost as much as the best one, and its gain; the empty plan if none gains."""
    enough = ENOUGH * max(plans.values(), default=0.0)
    best = [(plan, gain) for plan, gain in plans.items() if plan.blueprints and gain >= max(enough, LEAST_GAIN)]
    winners: list[Demonstration] = [((plan,), gain) for plan, gain in best]
    return winners or [((FixedPlan(),), 0.0)]


def _try_in_turn(plans: Mapping[FixedPlan, float], tried: Sequence[FixedPlan]) -> Demonstration:
    """The trials up to the first that gains enough, and its gain; all and the empty plan if there is none."""
    gains = [_gain_of(plans, plan.blueprints) for plan in tried]
    for number, gain in enumerate(gains):
        if gain >= max(ENOUGH * max(gains), LEAST_GAIN):
            return tuple(tried[: number + 1]), gain
    return (*tried, FixedPlan()), 0.0


def _try_together(plans: Mapping[FixedPlan, float], tried: Sequence[FixedPlan]) -> Demonstration:
    """All blueprints that are tried at the same time, then the best plan, or the empty one; and its gain."""
    names = dict.fromkeys(blueprint for plan in tried for _, blueprint in plan.blueprints)
    trial = FixedPlan(tuple(reversed(list(zip(TRIAL_PLACES, names, strict=False)))))
    best = max(tried, key=lambda plan: _gain_of(plans, plan.blueprints), default=FixedPlan())
    gain = _gain_of(plans, best.blueprints)
    return ((trial, best), gain) if gain >= LEAST_GAIN else ((trial, FixedPlan()), 0.0)


def _gain_of(plans: Mapping[FixedPlan, float], shape: tuple[tuple[str, str], ...]) -> float:
    """The gain of the same seeds in the same places at their best moment; 0 if it is not known."""
    return max((gain for plan, gain in plans.items() if plan.blueprints == shape), default=0.0)


class TaskVectorEnv(VectorEnv, Protocol):
    """An environment in which something grows."""

    space: ActionSpace
    rules: Rules

    def task_number(self, episode_seed: int) -> int: ...


def clone_plans(
    policy: Policy, environment: TaskVectorEnv, gains: TaskGains, settings: PPOSettings, run_seed: int
) -> dict[str, float | None]:
    """Run the teachers of the training tasks and train the policy to act as they do; returns what that cost.

    The costs have the names of those of a training run. A task without known plans is left out.
    """
    started = time.perf_counter()
    teachers = choose_teachers(gains, settings.cloning_trials, together=settings.cloning_together)
    indices = range(settings.cloning_rounds * environment.envs)
    seeds = [environment.episode_seed(CLONING_PURPOSE, run_seed, index) for index in indices]
    seeds = [episode_seed for episode_seed in seeds if environment.task_number(episode_seed) in teachers]
    turns = dict.fromkeys(teachers, 0)
    rollouts, weights = [], []
    for first in range(0, len(seeds), environment.envs):
        chosen = []
        for episode_seed in seeds[first : first + environment.envs]:
            number = environment.task_number(episode_seed)
            chosen.append(teachers[number][turns[number] % len(teachers[number])])
            turns[number] += 1
        controller = TrialController(
            environment.space, environment.rules, [each.plans for each in chosen], patience=settings.cloning_patience
        )
        rollouts.append(run_controller(environment, controller, policy, seeds[first : first + environment.envs]))
        weights.append(torch.tensor([each.weight for each in chosen]))
    fold_observations(policy, rollouts)
    clone_actions(
        policy, rollouts, weights, passes=settings.cloning_passes, minibatch=environment.envs, lr=settings.cloning_lr,
        grad_clip=settings.grad_clip, rng_seed=run_seed,
    )  # fmt: skip
    decisions = sum(rollout.decisions for rollout in rollouts)
    hosts = sum(float(rollout.outcome["gflops"].sum()) for rollout in rollouts if "gflops" in rollout.outcome)
    passes = UPDATE_PASSES * settings.cloning_passes * decisions * policy.flops / 1e9
    return {
        "episodes": len(seeds),
        "decisions": decisions,
        "gflops": hosts + passes,
        "seconds": time.perf_counter() - started,
    }
