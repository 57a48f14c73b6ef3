"""Shipped lists of tasks: what is known of each task before a controller is trained.

A list is a small JSON file in the directory `lists` of this package. `python -m esper.tasks NAME --headroom` measures
what it holds.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from esper.environment import KnownScores
from esper.files import write_file
from esper.tasks.distribution import TaskSpec
from esper.tasks.plans import FixedPlan

TASK_LISTS = Path(__file__).parent / "lists"


@dataclass(frozen=True)
class PlanScore:
    """A plan that ran on a task, and the mean validation score of its episodes."""

    plan: FixedPlan
    score: float
    episodes: int


@dataclass(frozen=True)
class KnownTask:
    """What is known of a task."""

    name: str
    family: str
    split: str
    digest: str  # of its settings; a task whose settings have changed is another task
    none: tuple[float, ...]  # validation scores of episodes without growth
    plans: tuple[PlanScore, ...]  # the best plans, each measured on episodes that did not choose it

    @property
    def scores(self) -> KnownScores | None:
        """The scores without growth and of the best plan, which may be not to grow; None if none was measured."""
        if not self.none:
            return None
        none = fmean(self.none)
        return KnownScores(none, max(none, *(each.score for each in self.plans)) if self.plans else None)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        plans = [{**each.plan.to_dict(), "score": each.score, "episodes": each.episodes} for each in self.plans]
        return {**vars(self), "none": list(self.none), "plans": plans}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "KnownTask":
        """From plain data."""
        plans = tuple(PlanScore(FixedPlan.from_dict(each), each["score"], each["episodes"]) for each in data["plans"])
        return cls(**{**data, "none": tuple(data["none"]), "plans": plans})


class TaskList:
    """The known tasks of a distribution.

    Arguments:
        name: of the distribution
        tasks: what is known
        settings: keys of the configuration that all scores depend on besides the tasks, with their values
        costs: episodes, GFLOPs and seconds of the search that measured the tasks, by split
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[KnownTask],
        settings: dict[str, Any],
        costs: dict[str, dict[str, float]] | None = None,
    ) -> None:
        self.name, self.tasks, self.settings, self.costs = name, tuple(tasks), settings, costs or {}
        self._by_digest = {task.digest: task for task in tasks}

    @property
    def fixed_plan(self) -> FixedPlan | None:
        """The plan that is best on average over the measured training tasks; None if none was measured."""
        trained = [task for task in self.tasks if task.split == "train"]
        measured = [{each.plan: each.score for each in task.plans} for task in trained if task.plans]
        common = [plan for plan in next(iter(measured), ()) if all(plan in own for own in measured)]
        return max(common, key=lambda plan: fmean(own[plan] for own in measured), default=None)

    def find(self, spec: TaskSpec) -> KnownTask | None:
        """What is known of a task; None if it is not in the list, or was measured with other settings."""
        return self._by_digest.get(task_digest(spec))

    def write(self, directory: Path = TASK_LISTS) -> Path:
        """Write the list, one line for each task; returns the path."""
        path = directory / f"{self.name}.json"
        rows = ",\n".join(json.dumps(task.to_dict()) for task in self.tasks)
        head = f'"name": {json.dumps(self.name)},\n"settings": {json.dumps(self.settings)}'
        head += f',\n"costs": {json.dumps(self.costs)}'
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, f'{{{head},\n"tasks": [\n{rows}\n]}}\n')
        return path

    @classmethod
    def load(cls, name: str, directory: Path = TASK_LISTS) -> "TaskList":
        """The shipped list of a distribution; empty if there is none."""
        path = directory / f"{name}.json"
        if not path.exists():
            return cls(name, (), {})
        data = json.loads(path.read_text(encoding="utf-8"))
        tasks = [KnownTask.from_dict(each) for each in data["tasks"]]
        return cls(data["name"], tasks, data["settings"], data.get("costs"))


def task_digest(spec: TaskSpec) -> str:
    """A short text that is the same for equal settings of a task, whatever its name and split."""
    settings = {key: value for key, value in spec.to_dict().items() if key not in ("name", "split")}
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()
