"""Run episodes of several arms in parallel."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from esper.controllers import Controller
from esper.environment import Environment, EpisodeStart, net_score
from esper.records import EpisodeLog, EpisodeRecord, make_record, to_plain

EpisodeKey = tuple[str, str | None, int, str]  # arm, checkpoint, episode seed, digest of its inputs


@dataclass(frozen=True)
class EpisodeJob:
    """Episodes of an arm that run together; for most arms it is a single one."""

    arm: str
    checkpoint: str | None  # the trained controller that the arm is, or is derived from
    episode_seeds: tuple[int, ...]
    controller: Controller[Any]
    start: EpisodeStart
    inputs_digest: str  # of everything its episodes depend on besides seed and task
    variant: str = ""  # distinguishes arms of one name: their settings, or the arm they are derived from
    recorded: int | None = None  # how many of the episodes are kept, from the first; None is all

    @property
    def keys(self) -> list[EpisodeKey]:
        return [(self.arm, self.checkpoint, seed, self.inputs_digest) for seed in self.episode_seeds[: self.recorded]]


def digest(inputs: object) -> str:
    """Of plain data: equal data have equal digests."""
    text = json.dumps(inputs, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def group_jobs(jobs: Sequence[EpisodeJob], width: int) -> Iterator[list[EpisodeJob]]:
    """Jobs in order, in rounds of about equal size that fit into `width` environments."""
    lanes = sum(len(job.episode_seeds) for job in jobs)
    size = -(-lanes // max(1, -(-lanes // width))) if lanes else width
    batch: list[EpisodeJob] = []
    for job in jobs:
        if batch and sum(len(other.episode_seeds) for other in batch) + len(job.episode_seeds) > size:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def run_jobs(
    environment: Environment,
    jobs: Iterable[EpisodeJob],
    known: Mapping[str, Any],
    on_step: Callable[[], None],
    *,
    test: bool,
) -> list[EpisodeRecord]:
    """The episodes of some jobs, all in parallel; with `test`, they end with a measurement on the test split.

    `known` are record fields that all of them share.
    """
    chosen = list(jobs)
    seeds = [seed for job in chosen for seed in job.episode_seeds]
    observation = environment.reset(seeds, [job.start for job in chosen for _ in job.episode_seeds])
    memories = [job.controller.begin(job.episode_seeds) for job in chosen]
    edges = torch.tensor([0, *(len(job.episode_seeds) for job in chosen)]).cumsum(0).tolist()
    lanes = [slice(first, last) for first, last in pairwise(edges)]
    thinking = [0.0] * len(chosen)
    log = EpisodeLog(environment.space, environment.rules, seeds)
    for _ in range(environment.steps):
        actions = []
        for index, job in enumerate(chosen):  # each by itself, so that no episode depends on its neighbours
            began = time.perf_counter()
            action, memories[index] = job.controller.act(observation.rows(lanes[index]), memories[index])
            actions.append(action.cpu())
            thinking[index] += time.perf_counter() - began
        step = environment.step(torch.cat(actions))
        log.add(torch.cat(actions), step)
        observation = step.observation
        on_step()
    found = _ends(environment, test)
    lines = []
    for index, job in enumerate(chosen):
        for env in range(lanes[index].start, lanes[index].start + len(job.keys)):
            parts = {name: to_plain(part[env]) for name, part in environment.flops_spent().items()}
            parts["controller"] = job.controller.flops * environment.steps
            lines.append(
                make_record(
                    environment, log, env,
                    **known,
                    **{name: to_plain(values[env]) for name, values in found.items()},
                    arm=job.arm,
                    checkpoint=job.checkpoint,
                    inputs_digest=job.inputs_digest,
                    variant=job.variant,
                    split="test" if test else "validation",
                    flops=sum(parts.values()),
                    flops_by_part=parts,
                    seconds=environment.seconds(env) + thinking[index] / len(job.episode_seeds),
                    embedding_parameters=_embeddings(environment.model(env).host),
                )
            )  # fmt: skip
    return lines


def _ends(environment: Environment, test: bool) -> dict[str, torch.Tensor]:
    """What the episodes came to: figures [envs]; `score` is what they are compared by."""
    outcome = environment.outcome()
    found = {
        "validation_score": outcome["validation_score"],
        "selection_score": outcome["score"],  # by which one may choose
        "score": outcome["score"],
        "parameters": environment.view.now.parameters,
    }
    if test:
        tested = environment.test()
        found |= {f"test_{name}": values for name, values in tested.items()}
        found["score"] = net_score(tested["score"], outcome["growth"])
    return found


def _embeddings(host: nn.Module) -> int:
    """Parameters of a host's embeddings, which language models are compared without."""
    return sum(module.weight.numel() for module in host.modules() if isinstance(module, nn.Embedding))
