"""The keys of the commands and of the groups without a `_target_`, with their types.

Arguments of targets have their types in the signatures of the targets.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NotRequired, TypedDict

from annotated_types import Ge, Gt, Lt
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import Profiler

from esper.arguments import Count, Name
from esper.controllers import Policy
from esper.data import Data
from esper.environment import Governor
from esper.growth import GrowthOptimizer
from esper.hosts import Host
from esper.lifecycle import ActionSpace, Rules
from esper.ppo import Collector, PPOSettings, VectorEnv
from esper.tasks import TaskDistribution


class HostSet(TypedDict):
    """Several hosts, of which each episode draws one."""

    hosts: Mapping[str, Host] | None


class SlotOptions(TypedDict):
    """The group `slots`."""

    names: list[str] | None
    blueprints: list[str] | None
    plugins: list[Name] | None


class SingleTask(TypedDict):
    """The group `tasks` without a distribution."""

    families: None
    repeats: Count


class SweepOptions(TypedDict):
    """The group `sweep`."""

    skip_completed: bool


class ReplayOptions(TypedDict):
    """The episode that the arm `replay` repeats."""

    records: str | None
    line: Annotated[int, Ge(0)]


class SearchOptions(TypedDict):
    """How arms find their plan under a budget of FLOPs."""

    budgets: list[float]
    finalists: Count
    finalist_seeds: Count
    lr_scales: list[Annotated[float, Gt(0)]] | None
    episodes: Count
    harm_seeds: Annotated[int, Ge(0)]
    seed: int
    cache: Name | None


class RuleOptions(TypedDict):
    """Values of hand-written controllers that depend on how seeds are committed."""

    latest: float
    blueprint: list[Name]
    blueprints: list[Name]


class NoOptions(TypedDict):
    """A group without keys."""


class TaskConfig(TypedDict):
    """The keys that all commands have."""

    host: Host | HostSet
    data: Data
    tasks: TaskDistribution | SingleTask
    slots: SlotOptions
    actions: ActionSpace
    environment: VectorEnv
    lifecycle: Rules  # refers to environment.steps
    optimizer: GrowthOptimizer
    governor: Governor
    reward: Callable[..., Any]
    seed: int
    gamma: float
    device: Name
    resume: str | None
    budget_share: NotRequired[float]  # set by debug=fast


class RunConfig(TaskConfig):
    """The configuration of `esper.run`."""

    policy: Policy
    ppo: PPOSettings
    collector: Collector
    trainer: Trainer
    logger: Mapping[str, Logger | None] | None
    callbacks: Mapping[str, Callback | None]
    profiler: Profiler | NoOptions
    name: Name
    rounds: Count
    decisions: Count | None
    validate_every: Annotated[int, Ge(0)]
    start: Name | None
    optimized_metric: str
    sweep: SweepOptions


class EvaluationConfig(TaskConfig):
    """The configuration of `esper.evaluate`; keys of `esper.run`, which experiments set, are not used."""

    controller: Mapping[str, Callable[..., Any]]
    controllers: str | list[str] | None
    agent: str | None
    ckpt: str | list[str] | None
    reference: str | None
    primary: str | None
    episodes: Count
    blueprint: list[Name]
    net2net_host: Name
    budgets: list[Annotated[float, Gt(0)]] | None
    search: SearchOptions
    schedules: Count | None
    growth: Mapping[str, RuleOptions]
    replay: ReplayOptions
    export: str | Annotated[int, Ge(0)] | None


class TuneOptions(TypedDict):
    """The search of `esper.tune`."""

    episodes: Count | None
    gflops: Annotated[float, Gt(0)] | None
    population: Annotated[int, Ge(4)] | None
    generation_seeds: Count
    sigma: Annotated[float, Gt(0), Lt(1)]
    fresh: Count


class TuneConfig(TaskConfig):
    """The configuration of `esper.tune`; keys of `esper.run`, which experiments set, are not used."""

    controller: Callable[..., Any]
    tune: TuneOptions
