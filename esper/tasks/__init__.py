"""Task distributions: families of tasks with ranges, which task a task seed draws, and what is known of tasks."""

from esper.tasks.distribution import TASK_NAME, TASK_SPLITS, TaskDistribution, TaskSpec
from esper.tasks.plans import LEAST_GAIN, PLACES, PLAN_MOMENTS, FixedPlan, refined_plans, screening_plans, slots_in
from esper.tasks.task_list import KnownTask, PlanScore, TaskList, task_digest

__all__ = [
    "LEAST_GAIN",
    "PLACES",
    "PLAN_MOMENTS",
    "TASK_NAME",
    "TASK_SPLITS",
    "FixedPlan",
    "KnownTask",
    "PlanScore",
    "TaskDistribution",
    "TaskList",
    "TaskSpec",
    "refined_plans",
    "screening_plans",
    "slots_in",
    "task_digest",
]
