"""Run episodes of several arms in parallel."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from esper.controllers import Controller
from esper.environment import Environment, EpisodeStart, net_score
from esper.records import EpisodeLog, EpisodeRecord, make_record, to_plain

EpisodeKey = tuple[str, str | None, int, str]  # arm, checkpoint, episode seed, inputs digest


@dataclass(frozen=True)
class EpisodeJob:
    """Episodes of an arm that run together; most jobs have a single one."""

    arm: str
    checkpoint: str | None  # the trained controller that the arm is, or is derived from
    episode_seeds: tuple[int, ...]
    controller: Controller[Any]
    start: EpisodeStart
    inputs_digest: str  # of everything its episodes depend on besides episode seed and task
    variant: str = ""  # distinguishes arms of one name: their settings, or the arm they are derived from
    record_count: int | None = None  # record only this many episodes, from the first; None records all

    @property
    def keys(self) -> list[EpisodeKey]:
        """Of the episodes that are recorded."""
        recorded = self.episode_seeds[: self.record_count]
        return [(self.arm, self.checkpoint, episode_seed, self.inputs_digest) for episode_seed in recorded]


def digest(inputs: object) -> str:
    """A hash of plain data."""
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


PLAN_PREFIX = "plan "  # of the inputs digest of an episode that a plan determines, in any arm


def is_plan(inputs_digest: str) -> bool:
    """Whether a plan determines the episode, so that arms with that plan share it."""
    return inputs_digest.startswith(PLAN_PREFIX)


def group_jobs(jobs: Sequence[EpisodeJob], envs: int) -> Iterator[list[EpisodeJob]]:
    """Jobs in order, in rounds of about equal size that fit into `envs` environments."""
    episodes = sum(len(job.episode_seeds) for job in jobs)
    size = -(-episodes // max(1, -(-episodes // envs))) if episodes else envs
    group: list[EpisodeJob] = []
    for job in jobs:
        if group and sum(len(other.episode_seeds) for other in group) + len(job.episode_seeds) > size:
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def run_jobs(
    environment: Environment,
    jobs: Iterable[EpisodeJob],
    shared_fields: Mapping[str, Any],
    on_step: Callable[[], None],
    *,
    test: bool,
) -> list[EpisodeRecord]:
    """Run the episodes of all jobs in parallel.

    Arguments:
        environment: has an environment for each episode
        jobs: what to run
        shared_fields: record fields that have the same value in all episodes
        on_step: called after each step
        test: whether episodes end with a measurement on the test split
    """
    group = list(jobs)
    episode_seeds = [episode_seed for job in group for episode_seed in job.episode_seeds]
    observation = environment.reset(episode_seeds, [start for job in group for start in _starts(job, environment)])
    memories = [job.controller.begin(job.episode_seeds) for job in group]
    edges = torch.tensor([0, *(len(job.episode_seeds) for job in group)]).cumsum(0).tolist()
    rows = [slice(first, last) for first, last in pairwise(edges)]
    controller_seconds = [0.0] * len(group)
    log = EpisodeLog(environment.space, environment.rules, episode_seeds)
    for _ in range(environment.steps):
        actions = []
        for index, job in enumerate(group):  # one job at a time, so that no episode depends on the others
            started = time.perf_counter()
            action, memories[index] = job.controller.act(observation.rows(rows[index]), memories[index])
            actions.append(action.cpu())
            controller_seconds[index] += time.perf_counter() - started
        step = environment.step(torch.cat(actions))
        log.add(torch.cat(actions), step)
        observation = step.observation
        on_step()
    outcome = _measure_outcome(environment, test)
    records = []
    for index, job in enumerate(group):
        for env in range(rows[index].start, rows[index].start + len(job.keys)):
            flops_by_part = {name: to_plain(part[env]) for name, part in environment.flops_spent().items()}
            if not environment.is_budgeted:  # else the environment has charged it
                flops_by_part["controller"] = job.controller.flops * environment.steps
            records.append(
                make_record(
                    environment, log, env,
                    **shared_fields,
                    **{name: to_plain(values[env]) for name, values in outcome.items()},
                    arm=job.arm,
                    checkpoint=job.checkpoint,
                    inputs_digest=job.inputs_digest,
                    variant=job.variant,
                    split="test" if test else "validation",
                    flops=sum(flops_by_part.values()),
                    flops_by_part=flops_by_part,
                    seconds=environment.seconds(env) + controller_seconds[index] / len(job.episode_seeds),
                    embedding_parameters=environment.host_pool.costs(episode_seeds[env]).embedding_parameters,
                )
            )  # fmt: skip
    return records


def _starts(job: EpisodeJob, environment: Environment) -> list[EpisodeStart]:
    """The start of each episode of a job; a budget pays for the controller too."""
    flops = job.controller.flops if environment.is_budgeted else 0
    return [replace(job.start, controller_flops=flops)] * len(job.episode_seeds)


def _measure_outcome(environment: Environment, test: bool) -> dict[str, torch.Tensor]:
    """The final values of all episodes by record field, each [envs]; arms are compared by `score`."""
    outcome = environment.outcome()
    values = {
        "validation_score": outcome["validation_score"],
        "selection_score": outcome["score"],
        "score": outcome["score"],
        "parameters": environment.view.now.parameters,
    }
    if test:
        tested = environment.test()
        values |= {f"test_{name}": scores for name, scores in tested.items()}
        values["score"] = net_score(tested["score"], outcome["growth"], environment.rent)
    return values
