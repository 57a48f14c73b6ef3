"""Play episodes of several arms side by side."""

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
from esper.environment import Environment, Start, rated
from esper.records import EpisodeLog, episode, plain

Key = tuple[str, str | None, int, str]  # arm, learner, seed, origin


@dataclass(frozen=True)
class Job:
    """Episodes of an arm that are played together, mostly a single one."""

    arm: str
    learner: str | None  # which trained controller the arm is, or is made from
    seeds: tuple[int, ...]
    controller: Controller[Any]
    start: Start
    origin: str  # a digest of all that its episodes follow from, beside seed and task
    rule: str = ""  # what tells arms of one name apart: the settings, or the arm that this one is made from
    recorded: int | None = None  # so many of the seeds count, the first; None is all

    @property
    def keys(self) -> list[Key]:
        return [(self.arm, self.learner, seed, self.origin) for seed in self.seeds[: self.recorded]]


def digest(made_from: object) -> str:
    """Of plain data: equal data have equal digests."""
    text = json.dumps(made_from, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def rounds(jobs: Sequence[Job], width: int) -> Iterator[list[Job]]:
    """Jobs in order, as many at a time as have room in `width` environments; the rounds are of about equal size."""
    lanes = sum(len(job.seeds) for job in jobs)
    size = -(-lanes // max(1, -(-lanes // width))) if lanes else width
    batch: list[Job] = []
    for job in jobs:
        if batch and sum(len(other.seeds) for other in batch) + len(job.seeds) > size:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def play(
    environment: Environment,
    jobs: Iterable[Job],
    about: Mapping[str, Any],
    on_step: Callable[[], None],
    *,
    test: bool,
) -> list[dict[str, Any]]:
    """The episodes of some jobs, all side by side, as plain data; with `test`, they end on the test split."""
    chosen = list(jobs)
    seeds = [seed for job in chosen for seed in job.seeds]
    observation = environment.reset(seeds, [job.start for job in chosen for _ in job.seeds])
    memories = [job.controller.begin(job.seeds) for job in chosen]
    edges = torch.tensor([0, *(len(job.seeds) for job in chosen)]).cumsum(0).tolist()
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
            passes = job.controller.flops * environment.steps
            spent = {**{name: plain(part[env]) for name, part in environment.spent().items()}, "controller": passes}
            own = {
                "controller": job.arm,
                "learner": job.learner,
                "origin": job.origin,
                "rule": job.rule,
                **{name: plain(values[env]) for name, values in found.items()},
                "flops": sum(spent.values()),
                "spent": spent,
                "seconds": environment.seconds(env) + thinking[index] / len(job.seeds),
                "embedding_parameters": _embeddings(environment.model(env).host),
            }
            lines.append(episode(environment, log, env, {**about, **own}))
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
        found["score"] = rated(tested["score"], outcome["growth"])
    return found


def _embeddings(host: nn.Module) -> int:
    """Parameters of a host's embeddings, which language models are compared without."""
    return sum(module.weight.numel() for module in host.modules() if isinstance(module, nn.Embedding))
