"""Searches as pure algorithms: successive halving, a grid, and the re-estimation of finalists.

A search is a generator: it yields the trials that it needs next, and gets their scores. So several searches, such as
those of different tasks, can run their trials together. A trial is a candidate, a share of the budget, and the number
of an episode seed of the search. Every share has its own number, the same for all candidates, so that they are compared
on equal terms.
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

Candidate = TypeVar("Candidate")
Result = TypeVar("Result")
Key = TypeVar("Key", bound=Hashable)

RUNGS = (1 / 16, 1 / 4, 1.0)  # shares of the budget that a candidate trains for, each from scratch
FULL_SEED = RUNGS.index(1.0)  # number of the episode seed of trials with the whole budget; finalists use the next too
GRID_WINNERS = 2  # candidates of a grid that train for the whole budget
GRID_SEEDS = 2  # episode seeds of each of them
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Trial(Generic[Candidate]):
    """One episode of a search."""

    candidate: Candidate
    share: float  # of the budget
    seed: int  # number of the search's episode seed


Search = Generator[Sequence[Trial[Candidate]], Sequence[float], Result]  # yields trials, gets scores: higher is better


@dataclass(frozen=True)
class Choice(Generic[Candidate]):
    """What a search has chosen."""

    candidate: Candidate
    score: float  # on validation, as far as the search measured it
    share: float  # of the budget, of the trials it was chosen by
    trials: tuple[Trial[Candidate], ...]  # all that led to the choice
    budget: float | None = None  # of the prefix of a successive halving, in budgets of an episode


def run_together(
    searches: Mapping[Key, Search[Candidate, Result]],
    measure: Callable[[Mapping[Key, Sequence[Trial[Candidate]]]], Mapping[Key, Sequence[float]]],
) -> dict[Key, Result]:
    """The results of several searches by key; `measure` gets the next trials of all that have not ended."""
    results: dict[Key, Result] = {}
    scores: Mapping[Key, Sequence[float] | None] = dict.fromkeys(searches)
    while scores:
        wanted: dict[Key, Sequence[Trial[Candidate]]] = {}
        for key, known in scores.items():
            try:
                wanted[key] = next(searches[key]) if known is None else searches[key].send(known)
            except StopIteration as end:
                results[key] = end.value
        scores = measure(wanted) if wanted else {}
    return {key: results[key] for key in searches}


def allocate(available: float, shares: Sequence[float] = RUNGS) -> list[int]:
    """The number of trials of each rung: `available` budgets, split evenly between the rungs that can afford one."""
    for count in range(len(shares), 0, -1):
        part = available / count
        if part + TOLERANCE >= shares[count - 1]:
            return [int(part / share + TOLERANCE) for share in shares[:count]] + [0] * (len(shares) - count)
    return [0] * len(shares)


def halve(candidates: Iterable[Candidate], budgets: Sequence[float]) -> Search[Candidate, list[Choice[Candidate]]]:
    """Successive halving with nested prefixes; returns the choice of each prefix.

    The first rung takes new candidates. Each further rung takes the best of the rung before it that it does not have
    yet. The choice of a prefix is the best of the highest rung that the search has reached so far.

    Arguments:
        candidates: in the order in which they are tried
        budgets: total cost of each prefix in budgets of an episode, ascending
    """
    source, known = iter(candidates), list[Candidate]()
    scores: list[dict[int, float]] = [{} for _ in RUNGS]  # by rung: number of the candidate -> score
    trials: list[Trial[Candidate]] = []
    choices, spent = [], 0.0
    for budget in budgets:
        for rung, count in enumerate(allocate(budget - spent)):
            if rung == 0:
                known += islice(source, count)
                chosen = list(range(len(scores[0]), len(known)))
            else:
                below = [number for number in scores[rung - 1] if number not in scores[rung]]
                chosen = sorted(below, key=lambda number: -scores[rung - 1][number])[:count]
            new = [Trial(known[number], RUNGS[rung], rung) for number in chosen]
            scores[rung] |= dict(zip(chosen, (yield new), strict=True))
            trials += new
        spent = budget
        highest = max(rung for rung, measured in enumerate(scores) if measured)
        best = max(scores[highest], key=lambda number: scores[highest][number])
        choices.append(Choice(known[best], scores[highest][best], RUNGS[highest], tuple(trials), budget))
    return choices


def re_estimate(
    candidates: Sequence[Candidate], seeds: int
) -> Search[Candidate, tuple[list[float], list[Trial[Candidate]]]]:
    """The mean score of each candidate with the whole budget over `seeds` episode seeds, and the trials of all."""
    trials = [Trial(candidate, 1.0, FULL_SEED + seed) for candidate in candidates for seed in range(seeds)]
    scores = list((yield trials))
    means = [sum(scores[index : index + seeds]) / seeds for index in range(0, len(scores), seeds)]
    return means, trials


def choose_finalist(choice: Choice[Candidate], finalists: int, seeds: int) -> Search[Candidate, Choice[Candidate]]:
    """Measure the best candidates of the highest rung again on several episode seeds, and choose by the mean.

    Arguments:
        choice: of the last prefix of a successive halving
        finalists: number of candidates
        seeds: episode seeds of each, that of the search included
    """
    if choice.share < 1:
        return choice  # no trial has the whole budget
    reached = [trial for trial in choice.trials if trial.share == choice.share]
    scored = sorted(zip((yield reached), range(len(reached)), strict=True), key=lambda pair: (-pair[0], pair[1]))
    candidates = [reached[index].candidate for _, index in scored[:finalists]]
    if len(candidates) < 2:
        return choice  # there is nothing to choose
    means, trials = yield from re_estimate(candidates, seeds)
    best = max(range(len(means)), key=means.__getitem__)
    return Choice(candidates[best], means[best], 1.0, (*choice.trials, *trials), choice.budget)


def halve_to_finalist(
    candidates: Iterable[Candidate], budgets: Sequence[float], finalists: int, seeds: int
) -> Search[Candidate, list[Choice[Candidate]]]:
    """A successive halving whose last choice is that of `choose_finalist`."""
    choices = yield from halve(candidates, budgets)
    final = yield from choose_finalist(choices[-1], finalists, seeds)
    return [*choices[:-1], final]


def search_grid(candidates: Sequence[Candidate]) -> Search[Candidate, list[Choice[Candidate]]]:
    """All candidates for a quarter of the budget, then the best for all of it; the only choice is by the mean."""
    quarter = [Trial(candidate, RUNGS[1], 1) for candidate in candidates]
    scores = list((yield quarter))
    order = sorted(range(len(candidates)), key=lambda number: -scores[number])[:GRID_WINNERS]
    winners = [candidates[number] for number in order]
    means, trials = yield from re_estimate(winners, GRID_SEEDS)
    best = max(range(len(means)), key=means.__getitem__)
    return [Choice(winners[best], means[best], 1.0, (*quarter, *trials))]
