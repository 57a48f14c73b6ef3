"""The tables of `python -m esper.tasks`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from esper.checkpoints import task_settings
from esper.command_line import CONF, find_experiment
from esper.config import build_distribution, build_environment, check_config, compose_config, task_specs
from esper.environment import Environment
from esper.evaluation.episode_store import EpisodeStore
from esper.evaluation.headroom import HeadroomStudy, TaskHeadroom
from esper.evaluation.output import make_console
from esper.evaluation.plans import first_blueprint
from esper.evaluation.runner import digest
from esper.evaluation.searches import SEARCH_TASK
from esper.evaluation.task_table import describe_task
from esper.tasks import KnownTask, TaskList, TaskSpec, task_digest

CACHE = Path("outputs/headroom")
PLAN_KINDS = ("screened", "refined")
LISTED_SETTINGS = (
    "data._target_", "data.resolution", "data.vocabulary", "data.block_size", "data.train", "data.validation",
    "environment.steps", "environment.budget", "optimizer.build.lr",
)  # fmt: skip


def report_tasks(name: str, split: str, count: int | None, overrides: Sequence[str], *, write: bool = False) -> None:
    """Print the tasks of a split, one row each; `write` adds those to the shipped list that it does not know."""
    config = compose_tasks(name, split, count, overrides)
    if write:
        _check_listed_settings(config)
    environment = build_environment(config, envs=config.tasks.repeats)
    blueprint = first_blueprint(config.blueprint, environment.space)
    table = Table("task", "data", title=f"{name}, {split}; full: {blueprint} in every slot")
    for column in ("parameters", "slots", "MFLOPs a sample", "GFLOPs", "batches", "batches full", "seconds"):
        table.add_column(column, justify="right")
    rows = [describe_task(environment, seed, blueprint) for seed in _one_seed_each(environment)]
    for row in sorted(rows, key=lambda row: row.name):
        table.add_row(
            row.name, row.data, f"{row.parameters:,}", str(row.slots), f"{row.sample_mflops:.2f}",
            f"{row.budget_gflops:.1f}", f"{row.bare_batches:,.0f}", f"{row.full_batches:,.0f}", f"{row.seconds:.1f}",
        )  # fmt: skip
    table.add_section()
    seconds = [row.seconds for row in rows]
    table.add_row(f"mean of {len(rows)}", *[""] * 7, f"{fmean(seconds):.1f}")
    environment.close()
    make_console().print(table)
    if write:
        every = compose_tasks(name, split, None, overrides)
        _write_list(every, split, [_unmeasured(spec) for spec in task_specs(config)])


def report_headroom(
    name: str, split: str, count: int | None, overrides: Sequence[str], *,
    plans: str, finalists: int, fresh: int, write: bool,
) -> None:  # fmt: skip
    """Search fixed plans for the tasks of a split, and print their headroom; `write` adds it to the shipped list."""
    if plans not in PLAN_KINDS:
        raise ValueError(f"--plans {plans}: must be one of {', '.join(PLAN_KINDS)}.")
    for key, value in (("finalists", finalists), ("fresh", fresh)):
        if value < 1:
            raise ValueError(f"--{key} {value}: must be at least 1.")
    config = compose_tasks(name, split, None, overrides)
    specs = task_specs(config)
    if count is not None and not 1 <= count <= len(specs):
        raise ValueError(f"--count {count}: must be between 1 and {len(specs)}, the number of {split} tasks.")
    if write:
        _check_listed_settings(config)
    environment = build_environment(config)
    settings = _settings(config)
    path = CACHE / f"{name}_{split}_{digest({**settings, 'tasks': len(specs), 'version': version('esper')})}.jsonl"
    try:
        with Progress(console=make_console(), transient=True) as progress:
            bar = progress.add_task(f"plans on {count or len(specs)} tasks", total=None)
            store = EpisodeStore(path)
            study = HeadroomStudy(environment, specs[:count], store, lambda: progress.advance(bar))
            results = study.run(refine=plans == "refined", finalists=finalists, fresh=fresh)
    finally:
        environment.close()
    print_headroom(results, f"{name}, {split}: best fixed plan is {results[0].fixed_plan.name}", make_console())
    make_console().print(f"episodes: {path}", soft_wrap=True)
    if write:
        own = [episode for episode in store.latest if episode.host in {spec.name for spec in specs[:count]}]
        gflops, seconds = sum(episode.flops or 0 for episode in own) / 1e9, sum(episode.seconds or 0 for episode in own)
        cost = {"episodes": len(own), "gflops": round(gflops, 1), "seconds": round(seconds)}
        _write_list(config, split, [result.to_known() for result in results], cost)


def _settings(config: DictConfig) -> dict[str, Any]:
    """What the scores of tasks depend on besides the tasks."""
    return task_settings(config, [group for group in SEARCH_TASK if group != "tasks"])


def _unmeasured(spec: TaskSpec) -> KnownTask:
    return KnownTask(spec.name, spec.family, spec.split, task_digest(spec), (), ())


def listed_settings(config: DictConfig) -> dict[str, Any]:
    settings = _settings(config)
    return {key: settings[key] for key in LISTED_SETTINGS if key in settings}


def _check_listed_settings(config: DictConfig) -> None:
    """Refuse to write scores into a list that was measured with other settings."""
    known, settings = TaskList.load(config.tasks.name), listed_settings(config)
    for key, value in known.settings.items():
        if settings.get(key) != value:
            raise ValueError(
                f"{key}={settings.get(key)}: must be {value} to write into the list of {known.name}, whose scores were "
                "measured with it."
            )


def _write_list(
    config: DictConfig, split: str, tasks: Sequence[KnownTask], cost: Mapping[str, float] | None = None
) -> None:
    """Put tasks of a split into the shipped list; scores of tasks that have not changed stay if these have none.

    Listed tasks that the distribution no longer has are dropped.
    """
    known, distribution = TaskList.load(config.tasks.name), build_distribution(config)
    assert distribution is not None
    measured = {task.digest: task for task in known.tasks if task.none}
    own = [_with_scores(task, measured.get(task.digest)) for task in tasks]
    names, today = {task.name for task in own}, {(spec.name, task_digest(spec)) for spec in distribution.specs()}
    others = [task for task in known.tasks if task.name not in names and (task.name, task.digest) in today]
    costs = {**known.costs, **({split: dict(cost)} if cost else {})}
    listed = TaskList(known.name, [*others, *own], {**known.settings, **listed_settings(config)}, costs)
    make_console().print(f"list: {listed.write()}", soft_wrap=True)


def _with_scores(task: KnownTask, measured: KnownTask | None) -> KnownTask:
    if task.none or measured is None:
        return task
    return replace(task, none=measured.none, plans=measured.plans)


def print_headroom(results: Sequence[TaskHeadroom], title: str, console: Console) -> None:
    """A row for each task, then means by family and of all tasks."""
    table = Table("task", title=title)
    for column in ("none", "fixed", "best", "headroom"):
        table.add_column(column, justify="right")
    table.add_column("best plan")

    def add_row(label: str, rows: Sequence[TaskHeadroom], plan: str) -> None:
        means = [fmean(getattr(row, key) for row in rows) for key in ("none", "fixed", "best", "headroom")]
        table.add_row(label, *(f"{mean:.2f}" for mean in means), plan)

    for result in sorted(results, key=lambda result: result.spec.name):
        add_row(result.spec.name, [result], result.plan.name)
    groups = {family: [r for r in results if r.spec.family == family] for family in {r.spec.family for r in results}}
    for section in (dict(sorted(groups.items())), {"all": results}):
        table.add_section()
        for label, own in section.items():
            cannot = sum(not result.can_profit for result in own)
            add_row(f"{label} ({len(own)})", own, f"growth cannot help on {cannot} of {len(own)}")
    console.print(table)


def compose_tasks(name: str, split: str, count: int | None, overrides: Sequence[str]) -> DictConfig:
    """The configuration of an evaluation on the tasks of a distribution's split."""
    known = sorted(path.stem for path in (CONF / "tasks").glob("*.yaml") if path.stem != "single")
    if name not in known:
        raise ValueError(f"{name}: is not a task distribution; there are {', '.join(known)}.")
    own = [f"tasks={name}", f"tasks.split={split}", *([f"tasks.counts.{split}={count}"] if count is not None else [])]
    config = compose_config("evaluate", [f"+experiment={find_experiment(name)}", *own, *overrides])
    check_config(config)
    return config


def _one_seed_each(environment: Environment) -> list[int]:
    """An episode seed of each task."""
    return environment.host_pool.episode_seeds("tasks", 0, 0)
