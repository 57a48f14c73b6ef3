"""CMA-ES over the numbers of a rule.

All candidates of a generation run on the same episode seeds, each of another task. Everything follows from the scores
of episodes and from the random seed, so an interrupted search continues as if it had not been interrupted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from cmaes import CMA  # type: ignore[import-untyped]  # has no type stubs

from esper.rng import derive_seed
from esper.tuning.ledger import EpisodeLedger, Numbers

SEARCH, FRESH = "tuning", "fresh tuning"  # purposes of episode seeds: of generations, and of finalists
MEASURED_AGAIN = 2  # the best numbers and the initial ones
COMPARED = 3  # mean of the last distribution, best candidate of the last generation, and the initial numbers


@dataclass(frozen=True)
class GenerationResult:
    """One generation. A gain is a score minus that of no growth on the task, or minus the generation's mean on it."""

    number: int
    score: float  # mean of all candidates
    gain: float  # mean of all candidates
    best_gain: float  # of the best candidate, mean over its episodes
    spread: float  # mean standard deviation of the numbers, as a share of their ranges
    episodes: int  # of the search so far
    gflops: float  # of the search so far


@dataclass(frozen=True)
class TuneResult:
    """The best numbers; scores are of fresh episodes, which have chosen nothing."""

    numbers: Numbers
    score: float
    initial_score: float  # of the initial numbers, on the same episodes
    difference: float  # of the two
    standard_error: float  # of the difference
    generations: int
    episodes: int  # of the whole search
    gflops: float


class RuleTuner:
    """A search for the best numbers of a rule.

    Arguments:
        ledger: runs the episodes
        ranges: lowest and highest value of each number
        initial: the numbers that the search begins with
        episodes: that the search may run, finalists included; None is no limit
        gflops: that it may spend, likewise; None is no limit
        population: candidates of a generation; None is 4 + 3 ln of the number of numbers
        generation_seeds: episodes of each candidate
        sigma: standard deviation of the first generation, as a share of the ranges
        fresh: episodes of each finalist; the best runs as many others, and these count
        rng_seed: of candidates and episode seeds
        none: returns the score without growth on the task of an episode seed; None where it is not known
    """

    def __init__(
        self,
        ledger: EpisodeLedger,
        ranges: Mapping[str, tuple[float, float]],
        initial: Numbers,
        *,
        episodes: int | None,
        gflops: float | None,
        population: int | None,
        generation_seeds: int,
        sigma: float,
        fresh: int,
        rng_seed: int,
        none: Callable[[int], float | None],
    ) -> None:
        if episodes is None and gflops is None:
            raise ValueError("tune.episodes=null: must be a number if tune.gflops is null.")
        self._ledger, self._initial, self._rng_seed, self._none = ledger, initial, rng_seed, none
        self._ranges, self._seeds, self._fresh = ranges, generation_seeds, fresh
        self._low, self._high = np.array(list(ranges.values()), dtype=np.float64).T
        self._search = CMA(
            mean=np.clip((np.array([initial[name] for name in ranges]) - self._low) / (self._high - self._low), 0, 1),
            sigma=sigma,
            bounds=np.array([[0.0, 1.0]] * len(ranges)),
            seed=derive_seed(SEARCH, rng_seed) % 2**32,
            population_size=population,
        )
        self._episodes, self._gflops = episodes, gflops
        self._needed = self._search.population_size * generation_seeds + (COMPARED + MEASURED_AGAIN) * fresh
        if episodes is not None and episodes < self._needed:
            raise ValueError(
                f"tune.episodes={episodes}: must be at least {self._needed}: {self._search.population_size} candidates "
                f"x {generation_seeds} episodes of one generation, and {COMPARED + MEASURED_AGAIN} x {fresh} of "
                "finalists."
            )

    def run(self, on_generation: Callable[[GenerationResult], None]) -> TuneResult:
        """Run generations while the budget pays for them, then choose a finalist on fresh episodes."""
        best, number = self._initial, 0
        while number == 0 or self._is_affordable():
            best, result = self._run_generation(number)
            on_generation(result)
            number += 1
        finalists = [self._numbers(self._search.mean), best, self._initial]
        scores = self._ledger.measure(finalists, FRESH, self._rng_seed, range(self._fresh))
        chosen = finalists[int(scores.mean(1).argmax())]
        again = range(self._fresh, 2 * self._fresh)
        score, initial_score = self._ledger.measure([chosen, self._initial], FRESH, self._rng_seed, again)
        difference = score - initial_score
        return TuneResult(
            numbers=chosen,
            score=float(score.mean()),
            initial_score=float(initial_score.mean()),
            difference=float(difference.mean()),
            standard_error=float(difference.std(ddof=1)) / self._fresh**0.5 if self._fresh > 1 else float("nan"),
            generations=number,
            episodes=self._ledger.episodes,
            gflops=self._ledger.gflops,
        )

    def _is_affordable(self) -> bool:
        """Whether the budget pays for a further generation and the finalists, at the mean cost of an episode so far."""
        episodes, gflops = self._ledger.episodes, self._ledger.gflops
        if self._episodes is None and gflops == 0:
            raise ValueError(f"tune.gflops={self._gflops}: needs tune.episodes here, because episodes cost no FLOPs.")
        if self._episodes is not None and episodes + self._needed > self._episodes:
            return False
        return self._gflops is None or gflops / episodes * (episodes + self._needed) <= self._gflops

    def _run_generation(self, number: int) -> tuple[Numbers, GenerationResult]:
        """Run one generation; returns its best candidate too."""
        shares = [self._search.ask() for _ in range(self._search.population_size)]
        candidates = [self._numbers(share) for share in shares]
        indices = range(number * self._seeds, (number + 1) * self._seeds)
        scores = self._ledger.measure(candidates, SEARCH, self._rng_seed, indices)
        known = [self._none(seed) for seed in self._ledger.seeds(SEARCH, self._rng_seed, indices)]
        base = [mean if none is None else none for none, mean in zip(known, scores.mean(0).tolist(), strict=True)]
        gains = (scores - np.array(base)).mean(1)
        self._search.tell([(share, -gain) for share, gain in zip(shares, gains.tolist(), strict=True)])
        result = GenerationResult(
            number=number,
            score=float(scores.mean()),
            gain=float(gains.mean()),
            best_gain=float(gains.max()),
            spread=float(np.std(shares, axis=0).mean()),
            episodes=self._ledger.episodes,
            gflops=self._ledger.gflops,
        )
        return candidates[int(gains.argmax())], result

    def _numbers(self, shares: np.ndarray) -> Numbers:
        """Numbers from shares of their ranges."""
        values = self._low + np.clip(shares, 0, 1) * (self._high - self._low)
        return dict(zip(self._ranges, np.clip(values, self._low, self._high).tolist(), strict=True))
