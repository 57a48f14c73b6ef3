"""The episodes of a search: kept in a file, and run only once."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from esper.controllers import Controller
from esper.environment import GrowthStep
from esper.observation import Observation, View
from esper.records import LineWriter, read_lines

TUNING_RECORDS = "tuning.jsonl"

Numbers = dict[str, float]
RuleKey = tuple[tuple[str, float], ...]  # numbers in their order


class RuleEnvironment(Protocol):
    """What a search needs of an environment: growing hosts, or an oracle."""

    envs: int
    steps: int

    def episode_seed(self, purpose: str, run_seed: int, index: int) -> int: ...

    def reset(self, episode_seeds: Sequence[int]) -> Observation: ...

    def step(self, action: Tensor) -> GrowthStep: ...

    def outcome(self) -> dict[str, Tensor]: ...

    @property
    def view(self) -> View: ...


class EpisodeLedger:
    """Runs episodes of rules, and counts what they cost.

    An episode depends on the numbers of its rule and on its episode seed. One that is in the file does not run again,
    but counts like any other, so that a search which continues ends with the same budget.

    Arguments:
        environment: that episodes run in
        build_rule: builds the rule with some numbers
        path: of the file
        on_episodes: called with the number of episodes that have just finished
    """

    def __init__(
        self,
        environment: RuleEnvironment,
        build_rule: Callable[[Numbers], Controller[Any]],
        path: Path,
        on_episodes: Callable[[int], None],
    ) -> None:
        self._environment, self._build_rule, self._path, self._on_episodes = environment, build_rule, path, on_episodes
        lines = read_lines(path, "a tuning") if path.exists() else ()
        self._known: dict[tuple[RuleKey, int], tuple[float, float]] = {
            (_key(line["numbers"]), line["episode_seed"]): (line["score"], line["gflops"]) for line in lines
        }
        self.episodes, self.gflops = 0, 0.0  # that count so far

    def measure(self, rules: Sequence[Numbers], purpose: str, rng_seed: int, indices: range) -> np.ndarray:
        """The score of each rule on the same episode seeds: [rules, seeds]. Runs what is missing.

        Arguments:
            rules: numbers of each
            purpose, rng_seed, indices: of the episode seeds
        """
        seeds = self.seeds(purpose, rng_seed, indices)
        wanted = [(_key(numbers), seed) for numbers in rules for seed in seeds]
        distinct = list(dict.fromkeys(wanted))
        missing = [episode for episode in distinct if episode not in self._known]
        self._on_episodes(len(distinct) - len(missing))
        writer = LineWriter(self._path)
        try:
            for first in range(0, len(missing), self._environment.envs):
                self._run(missing[first : first + self._environment.envs], writer)
        finally:
            writer.close()
        self.episodes += len(distinct)
        self.gflops += sum(self._known[episode][1] for episode in distinct)
        return np.array([self._known[episode][0] for episode in wanted]).reshape(len(rules), len(seeds))

    def seeds(self, purpose: str, rng_seed: int, indices: range) -> list[int]:
        return [self._environment.episode_seed(purpose, rng_seed, index) for index in indices]

    def _run(self, episodes: Sequence[tuple[RuleKey, int]], writer: LineWriter) -> None:
        """Run some episodes in parallel, and write them."""
        groups = [(dict(key), [seed for _, seed in own]) for key, own in groupby(episodes, lambda episode: episode[0])]
        results = run_rules(self._environment, [(self._build_rule(numbers), own) for numbers, own in groups])
        writer.write(
            *(
                {"numbers": dict(key), "episode_seed": seed, "score": score, "gflops": gflops}
                for (key, seed), (score, gflops) in zip(episodes, results, strict=True)
            )
        )
        self._known |= dict(zip(episodes, results, strict=True))
        self._on_episodes(len(episodes))


def run_rules(
    environment: RuleEnvironment, rules: Sequence[tuple[Controller[Any], Sequence[int]]]
) -> list[tuple[float, float]]:
    """The score and the GFLOPs of one episode for each rule and each of its episode seeds, all in parallel."""
    observation = environment.reset([seed for _, seeds in rules for seed in seeds])
    memories = [rule.begin(seeds) for rule, seeds in rules]
    rows = list(_slices([len(seeds) for _, seeds in rules]))
    for _ in range(environment.steps):
        actions = []
        for index, (rule, _) in enumerate(rules):  # one rule at a time, so that no episode depends on the others
            action, memories[index] = rule.act(observation.rows(rows[index]), memories[index])
            actions.append(action)
        observation = environment.step(torch.cat(actions)).observation
    gflops = environment.view.now.flops / 1e9
    return list(zip(environment.outcome()["score"].tolist(), gflops.tolist(), strict=True))


def _slices(sizes: Sequence[int]) -> Iterator[slice]:
    """Consecutive slices of some sizes."""
    first = 0
    for size in sizes:
        yield slice(first, first + size)
        first += size


def _key(numbers: Numbers) -> RuleKey:
    return tuple((name, float(value)) for name, value in numbers.items())
