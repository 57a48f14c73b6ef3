"""Shipped lists of tasks."""

from dataclasses import replace
from pathlib import Path

import pytest

from esper.config import compose_config, task_specs
from esper.tasks import FixedPlan, KnownTask, PlanScore, TaskList, TaskSpec, task_digest
from esper.tasks.task_list import TASK_LISTS

SPEC = TaskSpec("train00_narrow", "narrow", "train", {"channels": 4}, "data", {}, 1.0, 64, 300.0)


def test_a_list_knows_a_task_until_its_settings_change(tmp_path: Path) -> None:
    plans = (PlanScore(FixedPlan((("all", "norm"),), 0.1), 45.5, 2), PlanScore(FixedPlan(), 44.0, 2))
    known = KnownTask("train00_narrow", "narrow", "train", task_digest(SPEC), (43.5, 44.5), plans)
    assert TaskList("zoo", [known], {"steps": 20}).write(tmp_path) == tmp_path / "zoo.json"
    read = TaskList.load("zoo", tmp_path)
    assert read.tasks == (known,)
    assert read.settings == {"steps": 20}
    assert read.find(SPEC) == known
    assert read.find(replace(SPEC, name="test07_narrow", split="test")) == known
    assert read.find(replace(SPEC, lr_scale=2.0)) is None
    assert read.find(replace(SPEC, host={"channels": 5})) is None


def test_a_distribution_without_a_list_knows_nothing(tmp_path: Path) -> None:
    empty = TaskList.load("zoo", tmp_path)
    assert empty.tasks == ()
    assert empty.find(SPEC) is None


@pytest.mark.parametrize("name", sorted(path.stem for path in TASK_LISTS.glob("*.json")))
def test_every_task_of_a_shipped_list_is_a_task_of_its_distribution(name: str) -> None:
    """After a change of the distribution, `python -m esper.tasks NAME --headroom --write` measures the list again."""
    known = TaskList.load(name).tasks
    assert known
    for split in {task.split for task in known}:
        config = compose_config("evaluate", ["+experiment=zoo_ppo", f"tasks={name}", f"tasks.split={split}"])
        today = {spec.name: task_digest(spec) for spec in task_specs(config)}
        assert {task.name: task.digest for task in known if task.split == split}.items() <= today.items()
