"""The jobs of trained controllers, and of controls that see other inputs."""

from collections.abc import Callable
from typing import Any

from esper.controllers import (
    BlindPolicyController,
    Controller,
    PermutedPolicyController,
    PolicyController,
    ShuffledPolicyController,
)
from esper.environment import EpisodeStart
from esper.evaluation.arm_context import ArmContext
from esper.evaluation.runner import EpisodeJob, digest


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


def blind_jobs(context: ArmContext) -> list[EpisodeJob]:
    return _changed_policy_jobs(context, "ppo_blind", BlindPolicyController)


def shuffled_jobs(context: ArmContext) -> list[EpisodeJob]:
    return _changed_policy_jobs(context, "ppo_shuffled", ShuffledPolicyController)


def _changed_policy_jobs(
    context: ArmContext, arm: str, change: Callable[[PolicyController], Controller[Any]]
) -> list[EpisodeJob]:
    """Policies whose inputs are changed; each episode is one job, as it depends on no other."""
    jobs = []
    for label, policy in context.policies.items():
        variant, controller = context.training_digests.get(label, ""), change(policy)
        inputs = digest([arm, context.weights[label], context.settings("ppo"), variant])
        jobs += [
            EpisodeJob(arm, label, (episode_seed,), controller, EpisodeStart(), inputs, variant)
            for episode_seed in context.episode_seeds
        ]
    return jobs
