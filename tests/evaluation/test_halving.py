"""Searches as algorithms, with a function in place of episodes."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, pairwise

import pytest

from esper.evaluation.halving import (
    RUNGS,
    Choice,
    Result,
    Search,
    Trial,
    allocate,
    choose_finalist,
    halve,
    re_estimate,
    run_together,
    search_grid,
)


class Recorder:
    """Measures numbers: the candidate itself, plus noise that only some trials have."""

    def __init__(self, noise: dict[tuple[int, float, int], float] | None = None) -> None:
        self.trials: list[Trial[int]] = []
        self._noise = noise or {}

    def __call__(self, trials: Sequence[Trial[int]]) -> list[float]:
        self.trials += trials
        return [t.candidate + self._noise.get((t.candidate, t.share, t.seed), 0.0) for t in trials]

    def count(self, share: float) -> int:
        return sum(trial.share == share for trial in self.trials)


def run(search: Search[int, Result], measure: Recorder) -> Result:
    """The result of a single search."""
    return run_together({"only": search}, lambda wanted: {"only": measure(wanted["only"])})["only"]


def halved(candidates: Iterable[int], measure: Recorder, budgets: Sequence[float]) -> list[Choice[int]]:
    return run(halve(candidates, budgets), measure)


@pytest.mark.parametrize(
    ("available", "counts"), [(1, [8, 2, 0]), (3, [16, 4, 1]), (12, [64, 16, 4]), (0.1, [1, 0, 0]), (0.01, [0, 0, 0])]
)
def test_a_budget_is_split_evenly_between_the_rungs_that_can_afford_an_episode(
    available: float, counts: list[int]
) -> None:
    assert allocate(available) == counts


def test_each_prefix_spends_what_it_adds_and_keeps_earlier_trials() -> None:
    measure = Recorder()
    choices = halved(iter(range(1000)), measure, [1, 4, 16])
    assert [choice.budget for choice in choices] == [1, 4, 16]
    assert [sum(trial.share for trial in choice.trials) for choice in choices] == [1, 4, 16]
    assert [measure.count(share) for share in RUNGS] == [88, 22, 5]
    for shorter, longer in pairwise(choices):
        assert longer.trials[: len(shorter.trials)] == shorter.trials
    assert len({(trial.candidate, trial.share) for trial in measure.trials}) == len(measure.trials)


def test_a_rung_takes_the_best_of_the_rung_before_it() -> None:
    choices = halved(iter(range(1000)), Recorder(), [1, 4, 16])
    assert [choice.candidate for choice in choices] == [7, 23, 87]
    assert [choice.share for choice in choices] == [1 / 4, 1, 1]
    promoted = [trial.candidate for trial in choices[0].trials if trial.share == 1 / 4]
    assert sorted(promoted) == [6, 7]


def test_all_candidates_of_a_rung_share_an_episode_seed_and_rungs_have_different_ones() -> None:
    measure = Recorder()
    halved(iter(range(1000)), measure, [1, 4, 16])
    seeds = {share: {trial.seed for trial in measure.trials if trial.share == share} for share in RUNGS}
    assert seeds == {RUNGS[0]: {0}, RUNGS[1]: {1}, RUNGS[2]: {2}}


def test_a_search_ends_when_there_are_no_more_candidates() -> None:
    (choice,) = halved(iter(range(3)), Recorder(), [1])
    assert choice.candidate == 2
    assert len(choice.trials) == 3 + 2


def test_a_lucky_finalist_is_measured_again_and_loses() -> None:
    lucky = Recorder({(3, 1.0, 2): 100.0})
    (choice,) = halved([3, 2, 4, 1], lucky, [16])
    assert (choice.candidate, choice.score) == (3, 103.0)
    final = run(choose_finalist(choice, finalists=3, seeds=3), lucky)
    assert final.candidate == 3, "the mean of 103, 3 and 3 is the highest"
    slightly = Recorder({(3, 1.0, 2): 2.0})
    (choice,) = halved([3, 2, 4, 1], slightly, [16])
    assert choice.candidate == 3
    final = run(choose_finalist(choice, finalists=3, seeds=3), slightly)
    assert (final.candidate, final.score) == (4, 4.0)
    assert {trial.seed for trial in final.trials if trial.share == 1} == {2, 3, 4}


def test_a_search_too_short_for_a_whole_episode_measures_no_finalists() -> None:
    (choice,) = halved(count(), Recorder(), [1])
    assert run(choose_finalist(choice, finalists=3, seeds=3), Recorder()) is choice


def test_a_single_finalist_is_not_measured_again() -> None:
    measure = Recorder()
    choice = halved(count(), measure, [1, 4])[-1]
    measured = len(measure.trials)
    assert run(choose_finalist(choice, finalists=3, seeds=3), measure) is choice
    assert [trial.seed for trial in measure.trials[measured:]] == [2], "its own trial, which a store has"


def test_a_grid_is_measured_for_a_quarter_and_its_best_two_for_the_whole_budget() -> None:
    measure = Recorder({(5, 1.0, 2): -3.0})
    choice = run(search_grid([1, 5, 4, 3]), measure)[-1]
    assert choice.candidate == 4  # 5 scores 2 and 5, a mean of 3.5
    assert [measure.count(share) for share in RUNGS] == [0, 4, 4]
    assert sum(trial.share for trial in choice.trials) == 5


def test_re_estimates_are_means_over_the_same_episode_seeds() -> None:
    means, trials = run(re_estimate([1, 2], seeds=2), Recorder({(1, 1.0, 3): 4.0}))
    assert means == [3.0, 2.0]
    assert [(trial.candidate, trial.seed) for trial in trials] == [(1, 2), (1, 3), (2, 2), (2, 3)]


def test_searches_run_their_trials_together_and_each_gets_its_own_scores() -> None:
    rounds: list[dict[str, int]] = []

    def measure(wanted: Mapping[str, Sequence[Trial[int]]]) -> dict[str, list[float]]:
        rounds.append({key: len(trials) for key, trials in wanted.items()})
        sign = {"high": 1, "low": -1, "short": 1}
        return {key: [float(sign[key] * trial.candidate) for trial in trials] for key, trials in wanted.items()}

    searches = {
        "high": halve(range(1000), [1]), "low": halve(range(1000), [1]), "short": halve(range(3), [1]),
    }  # fmt: skip
    found = {key: choices[-1].candidate for key, choices in run_together(searches, measure).items()}
    assert found == {"high": 7, "low": 0, "short": 2}
    assert rounds[:2] == [{"high": 8, "low": 8, "short": 3}, {"high": 2, "low": 2, "short": 2}]
