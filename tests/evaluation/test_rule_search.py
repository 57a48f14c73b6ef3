"""The choice of rules for all tasks, with a table of scores in place of episodes, and the rules themselves."""

from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest
import torch

from esper.config import build, build_action_space
from esper.controllers import keeps_every_seed
from esper.evaluation.rule_search import choose_of_few, choose_of_many, plan_stages
from esper.evaluation.rules import RelativeSchedule, relative_schedules
from esper.lifecycle import ActionSpace, Rules
from tests.fixtures_environment import config


class TaskScores:
    """Scores options: the option itself, shifted by each task and by noise of each episode."""

    def __init__(self, tasks: int, noise: float = 0.0) -> None:
        self.used: list[tuple[int, range]] = []
        rng = np.random.default_rng(0)
        self._tasks, self._noise, self._rng = 20 * rng.normal(size=tasks), noise, rng

    def __call__(self, options: Sequence[int], numbers: range) -> list[float]:
        self.used.append((len(options), numbers))
        shift = np.mean([self._tasks[number % len(self._tasks)] for number in numbers])
        noise = self._noise * self._rng.normal(size=(len(options), len(numbers))).mean(1)
        return [float(option + shift + one) for option, one in zip(options, noise, strict=True)]

    @property
    def episodes(self) -> int:
        return sum(count * len(numbers) for count, numbers in self.used)


def test_a_search_among_many_spends_its_episodes_on_more_tasks_for_better_options() -> None:
    stages = plan_stages(500, 64)
    assert [(stage.options, len(stage.numbers)) for stage in stages] == [(26, 8), (10, 16), (2, 64)]
    assert sum(stage.options * len(stage.numbers) for stage in stages) <= 500
    numbers = [number for stage in stages for number in stage.numbers]
    assert len(numbers) == len(set(numbers)), "no two stages share an episode"
    assert [stage.numbers.start % 64 for stage in stages] == [0, 0, 0], "each begins a block of all tasks"


@pytest.mark.parametrize(("limit", "tasks"), [(1, 1), (5, 3), (20, 3), (30, 64), (500, 64), (500, 4), (2000, 12)])
def test_no_search_exceeds_its_episodes(limit: int, tasks: int) -> None:
    for choose in (choose_of_few, choose_of_many):
        scores = TaskScores(tasks)
        choice = choose(list(range(5)), scores, tasks, limit)
        assert scores.episodes <= max(limit, 5), choose
        assert sum(len(own) * len(numbers) for own, numbers in choice.tried) == scores.episodes


def test_the_best_of_many_options_is_found_although_tasks_differ() -> None:
    choice = choose_of_many(iter(range(1000)), TaskScores(64), 64, 500)
    assert choice.option == 25, "of the 26 that the episodes allow"
    assert choice.tasks == 64


def test_a_few_options_run_on_every_task_and_the_best_two_again() -> None:
    scores = TaskScores(64)
    choice = choose_of_few([3, 1, 5, 4, 2], scores, 64, 500)
    assert choice.option == 5
    assert scores.used == [(5, range(64)), (2, range(64, 128))]
    scores = TaskScores(64)
    assert choose_of_few([3, 1, 5, 4, 2], scores, 64, 330).option == 5
    assert scores.used == [(5, range(64))], "no episodes are left for a second time"


def space() -> ActionSpace:
    return build_action_space(config("slots.blueprints=[depthwise,norm]", "actions=lean", "lifecycle=quick"))


def test_a_schedule_in_places_fits_hosts_with_any_slots() -> None:
    schedule = RelativeSchedule(((0.25, "all", "norm", "ADD"), (0.1, "last", "depthwise", "ADD")))
    one, four = (schedule.germinations([f"block{n}" for n in range(count)]) for count in (1, 4))
    assert [(entry.slot, entry.blueprint[0], entry.at) for entry in one] == [("block0", "depthwise", 0.1)]
    assert [entry.slot for entry in four] == ["block3", "block0", "block1", "block2"]
    assert [entry.blueprint[0] for entry in four] == ["depthwise", "norm", "norm", "norm"]


def test_candidate_schedules_keep_every_seed_in_every_host_and_are_distinct() -> None:
    own, rules = space(), build(config("lifecycle=quick", "actions=lean").lifecycle)
    assert isinstance(rules, Rules)
    exists = torch.tensor([[True, True, True], [True, False, False], [True, True, True]])
    found = list(islice(relative_schedules(own, rules, 10, "norm", 0, exists), 15))
    assert len(set(found)) == 15
    assert [schedule.entries[0][1:3] for schedule in found[:4]] == [("all", "norm")] * 3 + [("all", "depthwise")]
    assert [schedule.entries[0][0] for schedule in found[:4]] == [0.0, 0.25, 0.5, 0.25]
    for schedule in found:
        for row in exists:
            entries = schedule.germinations(own.present_slots(row))
            assert keeps_every_seed(own, rules, 10, entries, row.unsqueeze(0))
    again = list(islice(relative_schedules(own, rules, 10, "norm", 0, exists), 15))
    assert again == found
    assert list(islice(relative_schedules(own, rules, 10, "norm", 1, exists), 15)) != found
