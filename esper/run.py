"""python -m esper.run: train a controller."""

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig
from rich.console import Console

from esper.config import CONF, build, build_offered, build_world, check_learning, entry, grows
from esper.data import DataError
from esper.ppo import PPO, AtomicIO, Collector, DivergedError, StoppedError, World, restore
from esper.resume import LAST, overridden, prepared, save_config
from esper.seeding import derive, seeded
from esper.telemetry import RoundRecords, conclusion, draw_rounds

WIDTH = 120  # columns of what is printed into a file
SHARE = 0.1  # of all rounds, that the first and the last are taken over in the summary


def build_module(config: DictConfig, world: World) -> PPO:
    """The learner, its first weights following from the seed."""
    with seeded(derive("policy", config.seed)):
        policy = build(config.policy, layout=world.layout, _partial_=False)
    return PPO(policy, build(config.ppo), config.seed)


def build_trainer(config: DictConfig, directory: Path, console: Console, module: PPO) -> Trainer:
    offers = {"directory": directory, "console": console, "rounds": config.rounds}
    places = {"checkpoints": {**offers, "directory": directory / "checkpoints"}}
    callbacks: list[Callback] = [
        build_offered(node, **places.get(name, offers)) for name, node in config.callbacks.items()
    ]
    done = module.counters
    loggers = []
    for node in config.logger.values():
        changes = {"purge_step": done.decisions + 1} if done.rounds and "TensorBoard" in node._target_ else {}
        loggers.append(build(node, save_dir=str(directory), _partial_=False, **changes))
    trainer: Trainer = build(
        config.trainer,
        max_epochs=config.rounds,
        callbacks=callbacks,
        logger=loggers or False,
        plugins=[AtomicIO()],
        check_val_every_n_epoch=config.validate_every or config.rounds + 1,
        default_root_dir=str(directory),
        _partial_=False,
    )
    progress = trainer.fit_loop.epoch_progress  # rounds are Lightning's epochs
    progress.load_state_dict(
        {"total": vars(progress.total), "current": dict.fromkeys(vars(progress.total), done.rounds)}
    )
    return trainer


def train(config: DictConfig, directory: Path, console: Console, resumed: bool = False) -> dict[str, float]:
    """Play and learn; checkpoints, figures and pictures go into `directory`. Gives the last figures."""
    check_learning(config)
    world = build_world(config)
    module = build_module(config, world)
    saved: dict[str, Any] = {}
    last = directory / "checkpoints" / LAST
    if resumed and last.exists():
        saved = restore(module, last)
        save_config(config, directory)
    last.parent.mkdir(parents=True, exist_ok=True)
    trainer = build_trainer(config, directory, console, module)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if callback.state_key in saved:
            callback.load_state_dict(saved[callback.state_key])
    watchers = [callback for callback in trainer.callbacks if hasattr(callback, "step_done")]  # type: ignore[attr-defined]
    collector = build(
        config.collector, environment=world, seed=config.seed, budget=config.decisions, watchers=watchers,
        _partial_=False,
    )  # fmt: skip
    announce(config, directory, console, world, module)
    started = time.perf_counter()
    try:
        with stoppable(collector):
            trainer.fit(module, datamodule=collector)
            if module.validated != module.counters.rounds:
                trainer.validate(module, datamodule=collector, verbose=False)
    except (StoppedError, SIGTERMException) as stop:
        reason = str(stop) or "SIGTERM"
        console.print(f"stopped by {reason} after round {module.counters.rounds}; go on with")
        console.print(f"  python -m esper.run resume={directory}", soft_wrap=True)
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            raise KeyboardInterrupt from None  # the jobs that wait are not meant to begin
        return module.latest
    finally:
        world.close()
    if trainer.is_global_zero:
        conclude(config, directory, console, module, time.perf_counter() - started)
    return module.latest


@contextmanager
def stoppable(collector: Collector) -> Iterator[None]:
    """SIGINT and SIGTERM let the run stop where nothing is half done; a second one ends it at once."""

    def ask(number: int, frame: object) -> None:
        if collector.stop is not None:
            raise KeyboardInterrupt
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
    console.print(f"policy      {parameters:,} parameters; heads {', '.join(world.layout.head_names)}")
    console.print(f"rounds      {config.rounds - done} to come{f' ({done} done)' if done else ''}, each of {steps}")
    console.print(f"to watch    tensorboard --logdir {directory}", soft_wrap=True)


def conclude(config: DictConfig, directory: Path, console: Console, module: PPO, seconds: float) -> None:
    """Table, picture, and what to type next."""
    rounds = RoundRecords(directory).lines()
    if not rounds:
        return
    held_out = {name: value for name, value in module.latest.items() if name.startswith("validation/")}
    console.print(conclusion(rounds, held_out, SHARE))
    rounds[-1].update(held_out)
    draw_rounds(rounds, f"{config.name}, seed {config.seed}", directory / "rounds.png")
    summary = {**module.description()["counters"], "seconds": seconds, **module.latest}
    (directory / "summary.json").write_text(json.dumps(summary, indent=2))
    console.print(f"{directory}/rounds.png, rounds.jsonl, summary.json, checkpoints/{LAST}", soft_wrap=True)
    console.print("next:")
    console.print(f"  tensorboard --logdir {directory}", soft_wrap=True)
    console.print(f"  python -m esper.run resume={directory} rounds={2 * config.rounds}", soft_wrap=True)
    if (CONF / "experiment" / f"{config.name}.yaml").is_file() and grows(config):
        console.print(f"  python -m esper.evaluate +experiment={config.name}", soft_wrap=True)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
def main(config: DictConfig) -> float | None:
    torch.set_num_threads(1)  # environments run in threads of their own
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning asks torch in a way that will go
    quiet = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0))) > 0  # one process speaks for all
    console = Console(quiet=quiet) if sys.stdout.isatty() else Console(width=WIDTH, quiet=quiet)
    running = HydraConfig.get()
    directory = Path(running.runtime.output_dir)
    try:
        resumed = config.resume is not None
        if resumed:
            config, changes = overridden(config, directory, list(running.overrides.task))
            for change in changes:
                console.print(f"changed     {change}", soft_wrap=True)
        figures = train(config, directory, console, resumed)
    except (ValueError, DataError, DivergedError) as error:
        if not (directory / "checkpoints").exists():
            shutil.rmtree(directory)  # nothing has begun: only what Hydra has just written is there
        sys.exit(str(error))
    return figures.get(config.optimized_metric)


def cli() -> None:
    sys.argv[1:] = prepared(sys.argv[1:])
    entry(main, "run")


if __name__ == "__main__":
    cli()
