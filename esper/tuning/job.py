"""One search, as its configuration describes it."""

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml  # type: ignore[import-untyped]  # has no type stubs
from omegaconf import DictConfig, open_dict
from rich.console import Console
from rich.progress import Progress

from esper.checkpoints.resume import save_config
from esper.config import build_vector_env, build_with, check_tuning_config, known_tasks, task_specs
from esper.controllers import RULE_RANGES
from esper.environment import Environment
from esper.files import write_file
from esper.tuning.ledger import TUNING_RECORDS, EpisodeLedger, Numbers
from esper.tuning.tuner import GenerationResult, RuleTuner, TuneResult

TUNED = "tuned"  # name of the preset that is written
HEADER = "generation   episodes      GFLOPs    score    gain    best  spread"


def tune(
    config: DictConfig, directory: Path, console: Console, overrides: Sequence[str] | None = None
) -> TuneResult | None:
    """Tune a rule, and write its numbers; returns None after an interrupt.

    Arguments:
        config: of `esper.tune`
        directory: of the episodes and the result; episodes in it do not run again
        console: where generations are printed
        overrides: that the configuration was composed from, saved for a later resume; None saves nothing
    """
    check_tuning_config(config)
    drawn = training_tasks(config)
    environment = build_vector_env(drawn)
    initial = {name: float(config.controller[name]) for name in RULE_RANGES}

    def build_rule(numbers: Numbers) -> Any:
        node = copy.deepcopy(config.controller)
        node.update(numbers)
        return build_with(node, space=environment.space)

    with closing(environment), Progress(console=console, transient=True) as progress:
        bar = progress.add_task("episodes", total=config.tune.episodes)
        ledger = EpisodeLedger(
            environment, build_rule, directory / TUNING_RECORDS, lambda count: progress.advance(bar, count)
        )
        build_rule(initial)  # refuses numbers outside of their ranges
        none = known_scores(drawn, environment)
        tuner = RuleTuner(ledger, RULE_RANGES, initial, **config.tune, rng_seed=config.seed, none=none)
        if overrides is not None:
            save_config(config, directory, overrides)
        progress.console.print(f"-> {directory}", soft_wrap=True)
        progress.console.print(HEADER)
        try:
            result = tuner.run(lambda generation: progress.console.print(_row(generation), highlight=False))
        except KeyboardInterrupt:
            console.print(f"interrupted; resume with\n  python -m esper.tune resume={directory}", soft_wrap=True)
            return None
    _write_result(config, directory, result)
    _print_result(result, directory, console)
    return result


def training_tasks(config: DictConfig) -> DictConfig:
    """The configuration with training tasks only, each episode of another task."""
    changed = copy.deepcopy(config)
    with open_dict(changed):
        changed.pop("rounds", None)  # of a training run, which also has validation tasks
        if "_target_" in changed.tasks:
            changed.tasks.split, changed.tasks.repeats = "train", 1
        if "repeats" in changed.environment:
            changed.environment.repeats = 1
    return changed


def known_scores(config: DictConfig, environment: Any) -> Callable[[int], float | None]:
    """A function that returns the score without growth on the task of an episode seed; None where it is not known."""
    if not isinstance(environment, Environment) or not (specs := task_specs(config)):
        return lambda episode_seed: None
    known = known_tasks(config)
    found = {spec.name: known.find(spec) for spec in specs}
    scores = {name: fmean(task.none) for name, task in found.items() if task is not None and task.none}
    return lambda episode_seed: scores.get(environment.host_pool.host_name(episode_seed))


def _row(result: GenerationResult) -> str:
    return (
        f"{result.number:>10} {result.episodes:>10,} {result.gflops:>11,.1f} {result.score:>8.2f} {result.gain:>+7.2f} "
        f"{result.best_gain:>+7.2f} {result.spread:>7.3f}"
    )


def _write_result(config: DictConfig, directory: Path, result: TuneResult) -> None:
    """Write the numbers as a preset of the group controller, and everything as JSON."""
    preset = {"_target_": str(config.controller._target_), "_partial_": True, **result.numbers}
    about = (
        f"# Tuned by python -m esper.tune with {result.episodes:,} episodes and {result.gflops:,.1f} GFLOPs: score "
        f"{result.score:.2f}, {result.difference:+.2f} over the numbers it began with\n"
    )
    write_file(directory / "controller" / f"{TUNED}.yaml", about + yaml.safe_dump(preset, sort_keys=False))
    plain = {key: None if value != value else value for key, value in asdict(result).items()}
    write_file(directory / "tuning.json", json.dumps(plain, indent=2))


def _print_result(result: TuneResult, directory: Path, console: Console) -> None:
    console.print(
        f"score {result.score:.2f} on fresh episodes, {result.difference:+.2f} ± {result.standard_error:.2f} (standard "
        f"error) over the numbers it began with; {result.episodes:,} episodes, {result.gflops:,.1f} GFLOPs",
        soft_wrap=True,
    )
    numbers = ", ".join(f"{name} {value:.3g}" for name, value in result.numbers.items())
    console.print(numbers, soft_wrap=True)
    console.print(
        f'python -m esper.evaluate --config-dir {directory} "controller@controller.tuned_rule={TUNED}" '
        '"controllers=[none,tuned_rule]"',
        soft_wrap=True,
        markup=False,
    )
