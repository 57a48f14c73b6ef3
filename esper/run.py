"""python -m esper.run: train a controller."""

import json
import logging
import math
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig
from rich.console import Console

from esper.config import CONF, build, build_offered, build_world, check_learning, entry, grows
from esper.data import DataError
from esper.environment import Environment
from esper.learners import begin_with
from esper.ppo import (
    LAST,
    PPO,
    AtomicIO,
    Collector,
    Counters,
    DivergedError,
    RankLostError,
    StoppedError,
    Watcher,
    World,
    restore,
    together,
)
from esper.resume import flat, overridden, prepared, save
from esper.seeding import derive, seeded
from esper.sweep import SUMMARY, asked, job, speaks, sweeping, told
from esper.telemetry import Attention, Episodes, Progress, RoundRecords, conclusion, draw_rounds

WIDTH = 120  # columns of what is printed into a file
PATIENCE = 1.0  # seconds after which a second signal is meant as one
SHARE = 0.1  # of all rounds, that the first and the last are taken over in the summary


def build_module(config: DictConfig, world: World) -> PPO:
    """The learner, its first weights following from the seed."""
    with seeded(derive("policy", config.seed)):
        policy = build(config.policy, layout=world.layout, _partial_=False)
    return PPO(policy, build(config.ppo), config.seed)


def build_callbacks(config: DictConfig, directory: Path, console: Console, world: World) -> list[Callback]:
    """Those that are switched on, each given what it asks for of what a run has to offer."""
    offers = {
        "directory": directory,
        "console": console,
        "rounds": config.rounds,
        "decisions": config.decisions,
        "settings": {**chosen_options(), **flat(config)},
        "attention": Attention(),
        "episodes": Episodes(world) if isinstance(world, Environment) else None,
    }
    places = {"checkpoints": {**offers, "directory": directory / "checkpoints"}}
    chosen = {name: node for name, node in config.callbacks.items() if node is not None}
    return [build_offered(node, **places.get(str(name), offers)) for name, node in chosen.items()]


def chosen_options() -> dict[str, str]:
    """Which option of each group a run on the command line has."""
    if not HydraConfig.initialized():
        return {}
    choices = HydraConfig.get().runtime.choices
    return {name: str(option) for name, option in choices.items() if "/" not in name and "@" not in name}


def watchers_of(callbacks: Sequence[Callback]) -> list[Watcher]:
    """Callbacks that watch rounds, and whatever gathers episodes for them."""
    gatherers = {id(g): g for g in (getattr(callback, "gatherer", None) for callback in callbacks) if g is not None}
    return [*gatherers.values(), *[callback for callback in callbacks if isinstance(callback, Progress)]]


def build_trainer(config: DictConfig, directory: Path, callbacks: list[Callback], done: Counters) -> Trainer:
    loggers = []
    for node in config.logger.values():
        changes: dict[str, object] = {}
        if done.rounds and "TensorBoard" in node._target_:
            changes = {"purge_step": done.decisions + 1}
        elif done.rounds and "CSV" in node._target_:  # which would begin its file anew
            changes = {"version": f"from_round_{done.rounds}"}
        loggers.append(build(node, save_dir=str(directory), _partial_=False, **changes))
    offers = {"directory": directory, "dirpath": str(directory), "device": torch.device(config.device)}
    trainer: Trainer = build(
        config.trainer,
        max_epochs=config.rounds,
        callbacks=callbacks,
        logger=loggers or False,
        plugins=[AtomicIO()],
        profiler=build_offered(config.profiler, **offers) if "_target_" in config.profiler else None,
        check_val_every_n_epoch=config.validate_every or config.rounds + 1,
        default_root_dir=str(directory),
        _partial_=False,
    )
    progress = trainer.fit_loop.epoch_progress  # rounds are Lightning's epochs
    fields = vars(progress.total)
    progress.load_state_dict({"total": fields, "current": dict.fromkeys(fields, done.rounds)})
    return trainer


def train(
    config: DictConfig, directory: Path, console: Console, resumed: Sequence[str] | None = None
) -> dict[str, float]:
    """Play and learn; checkpoints, figures and pictures go into `directory`. Gives the last figures.

    `resumed` are all overrides of a run that goes on; None begins one.
    """
    check_learning(config)
    world = build_world(config)
    module = build_module(config, world)
    saved: dict[str, Any] = {}
    last = directory / "checkpoints" / LAST
    if resumed is not None and last.exists():
        saved = restore(module, last)
        recall(module, directory)
        if config.rounds < module.counters.rounds:
            raise ValueError(f"rounds={config.rounds}: {module.counters.rounds} are done already.")
    elif start := config.get("start"):
        module.earlier = begin_with(start, module.policy)
    if resumed is not None and speaks():
        save(config, directory, resumed)
    callbacks = build_callbacks(config, directory, console, world)
    for callback in callbacks:
        if callback.state_key in saved:
            callback.load_state_dict(saved[callback.state_key])
    trainer = build_trainer(config, directory, callbacks, module.counters)
    collector = build(
        config.collector, environment=world, seed=config.seed, budget=config.decisions,
        watchers=watchers_of(callbacks), _partial_=False,
    )  # fmt: skip
    last.parent.mkdir(parents=True, exist_ok=True)
    announce(config, directory, console, world, module)
    started = time.perf_counter()
    try:
        with stoppable(collector), together():
            if not collector.spent(module.counters.decisions):
                trainer.fit(module, datamodule=collector)
            if module.validated != module.counters.rounds:
                trainer.validate(module, datamodule=collector, verbose=False)
    except (StoppedError, SIGTERMException) as stop:
        reason = str(stop) or "SIGTERM"
        console.print(f"stopped by {reason} after round {module.counters.rounds}; go on with")
        what = f"-m resume={HydraConfig.get().sweep.dir}" if sweeping() else f"resume={directory}"
        console.print(f"  python -m esper.run {what}", soft_wrap=True)
        if sweeping():
            raise KeyboardInterrupt from None  # the jobs that wait are not meant to begin
        return module.latest
    finally:
        world.close()
    if trainer.is_global_zero:
        conclude(config, directory, console, module, time.perf_counter() - started)
    return module.latest


def recall(module: PPO, directory: Path) -> None:
    """The figures of the last round that a resumed run has behind it."""
    for line in RoundRecords(directory).lines():
        if line["round"] == module.counters.rounds:
            numbers = {name: value for name, value in line.items() if "/" in name and value is not None}
            module.latest.update(numbers)
            if any(name.startswith("validation/") for name in numbers):
                module.validated = module.counters.rounds


@contextmanager
def stoppable(collector: Collector) -> Iterator[None]:
    """SIGINT and SIGTERM let the run stop where nothing is half done; a second one, later, ends it at once.

    What stops a group of processes often sends its signal twice in the same moment.
    """
    asked = float("inf")

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if time.monotonic() > asked + PATIENCE:
            raise KeyboardInterrupt
        asked = min(asked, time.monotonic())
        collector.stop = signal.Signals(number).name

    wanted = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old = {number: signal.getsignal(number) for number in wanted}
    for number, handler in old.items():
        if handler is not signal.SIG_IGN:  # of a job in the background, which Ctrl-C is not meant for
            signal.signal(number, ask)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def announce(config: DictConfig, directory: Path, console: Console, world: World, module: PPO) -> None:
    done = module.counters.rounds
    parameters = sum(parameter.numel() for parameter in module.policy.parameters())
    steps = f"{world.envs} episodes of {world.steps} steps"
    console.print(f"run         {directory}", soft_wrap=True)
    console.print(f"device      {config.device} for hosts, {config.trainer.accelerator} for the policy")
    console.print(f"data        {world.name}")
    begun = f"; begins with what {config.start} has learned" if module.earlier and not done else ""
    console.print(f"policy      {parameters:,} parameters; heads {', '.join(world.layout.head_names)}{begun}")
    until = "" if config.decisions is None else f", or {config.decisions:,} decisions"
    behind = f" ({done} done)" if done else ""
    console.print(f"rounds      {config.rounds - done} to come{behind}, each of {steps}{until}")
    console.print(f"to watch    tensorboard --logdir {directory}", soft_wrap=True)


def conclude(config: DictConfig, directory: Path, console: Console, module: PPO, seconds: float) -> None:
    """Table, picture, and what to type next."""
    held_out = {name: value for name, value in module.latest.items() if name.startswith("validation/")}
    records = RoundRecords(directory)
    if any(line["round"] == module.counters.rounds for line in records.lines()):
        rounds = records.amend(held_out)
        console.print(conclusion(rounds, held_out, SHARE))
        draw_rounds(rounds, f"{config.name}, seed {config.seed}", directory / "rounds.png")
    figures = {name: value if math.isfinite(value) else None for name, value in module.latest.items()}
    summary = {**asdict(module.counters), "asked": asked(config), "seconds": seconds, **figures}
    unfinished = directory / "summary.part"
    unfinished.write_text(json.dumps(summary, indent=2, allow_nan=False))
    unfinished.replace(directory / SUMMARY)
    left = [name for name in ("rounds.png", "rounds.jsonl", "summary.json") if (directory / name).exists()]
    console.print(f"{directory}/{', '.join(left)}", soft_wrap=True)
    console.print("next:")
    console.print(f"  tensorboard --logdir {directory}", soft_wrap=True)
    longer = f"rounds={2 * config.rounds}" if config.decisions is None else f"decisions={2 * config.decisions}"
    console.print(f"  python -m esper.run resume={directory} {longer}", soft_wrap=True)
    if grows(config):
        console.print(f"  python -m esper.evaluate ckpt={directory}", soft_wrap=True)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
def main(config: DictConfig) -> float | None:
    prepare_process()
    console = Console(quiet=not speaks()) if sys.stdout.isatty() else Console(width=WIDTH, quiet=not speaks())
    running = HydraConfig.get()
    directory = Path(running.runtime.output_dir)
    if sweeping():
        overrides = list(running.overrides.task)
        again = {True: overrides, False: None}
        return job(config, directory, lambda each, begun: train(each, directory, console, again[begun]))
    try:
        resumed = config.resume is not None
        if resumed:
            config, changes = overridden(config, directory, overrides=running.overrides.task)
            for change in changes:
                console.print(f"changed     {change}", soft_wrap=True)
        figures = train(config, directory, console, list(running.overrides.task) if resumed else None)
    except RankLostError as error:
        sys.exit(f"{error}; go on with python -m esper.run resume={directory}")
    except (ValueError, DataError, DivergedError) as error:
        if not resumed:
            take_back(directory)
        sys.exit(str(error))
    return figures.get(config.optimized_metric)


def prepare_process() -> None:
    torch.set_num_threads(1)  # environments run in threads of their own
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    observer = "lightning.fabric.strategies.launchers.subprocess_script"
    logging.getLogger(observer).setLevel(logging.INFO)  # tells of a rank that died before it ends the others
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning asks torch in a way that will go
    warnings.filterwarnings("ignore", ".*sync_dist=True")  # ranks agree before they log


def take_back(directory: Path) -> None:
    """What Hydra has written for a run that did not begin; whatever else is there stays."""
    logs = list(directory.glob("*.log"))
    if set(directory.iterdir()) <= {directory / ".hydra", *logs}:
        shutil.rmtree(directory / ".hydra", ignore_errors=True)
        for log in logs:
            log.unlink(missing_ok=True)
        with suppress(OSError):
            directory.rmdir()


def cli() -> None:
    try:
        sys.argv[1:] = prepared(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    entry(told()(main), "run")


if __name__ == "__main__":
    cli()
