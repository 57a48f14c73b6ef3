"""One training run: built from its configuration, fitted, summarised."""

import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig
from rich.console import Console

from esper.checkpoints import load_start_weights
from esper.checkpoints.resume import save_config
from esper.config import (
    build,
    build_vector_env,
    build_with,
    check_training_config,
    chosen_options,
    flatten,
    grows_hosts,
)
from esper.environment import Environment
from esper.ppo import (
    LAST,
    PPO,
    AtomicCheckpointIO,
    Collector,
    Counters,
    RoundListener,
    StoppedError,
    VectorEnv,
    detect_lost_rank,
    restore_module,
)
from esper.rng import derive_seed, seeded_init
from esper.sweeps import SUMMARY, in_sweep, is_rank_zero, requested_length
from esper.telemetry import DetailWindow, EpisodeBuffer, ProgressDisplay, RoundWriter, draw_rounds, summary_table

PATIENCE = 1.0  # seconds after which a second signal is meant as one
SHARE = 0.1  # of all rounds, that the first and the last are taken over in the summary


def build_module(config: DictConfig, world: VectorEnv) -> PPO:
    """The learner, its first weights following from the seed."""
    with seeded_init(derive_seed("policy", config.seed)):
        policy = build(config.policy, layout=world.layout, _partial_=False)
    return PPO(policy, build(config.ppo), config.seed)


def build_callbacks(config: DictConfig, directory: Path, console: Console, world: VectorEnv) -> list[Callback]:
    """Those that are switched on, each given what it asks for of what a run has to offer."""
    offers = {
        "directory": directory,
        "console": console,
        "rounds": config.rounds,
        "decisions": config.decisions,
        "settings": {**chosen_options(), **flatten(config)},
        "attention": DetailWindow(),
        "episodes": EpisodeBuffer(world) if isinstance(world, Environment) else None,
    }
    places = {"checkpoints": {**offers, "directory": directory / "checkpoints"}}
    chosen = {name: node for name, node in config.callbacks.items() if node is not None}
    return [build_with(node, **places.get(str(name), offers)) for name, node in chosen.items()]


def round_listeners(callbacks: Sequence[Callback]) -> list[RoundListener]:
    """Callbacks that watch rounds, and whatever gathers episodes for them."""
    buffers = {id(g): g for g in (getattr(callback, "episode_buffer", None) for callback in callbacks) if g is not None}
    return [*buffers.values(), *[callback for callback in callbacks if isinstance(callback, ProgressDisplay)]]


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
        plugins=[AtomicCheckpointIO()],
        profiler=build_with(config.profiler, **offers) if "_target_" in config.profiler else None,
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
    check_training_config(config)
    world = build_vector_env(config)
    module = build_module(config, world)
    saved: Mapping[str, Any] = {}
    last = directory / "checkpoints" / LAST
    if resumed is not None and last.exists():
        saved = restore_module(module, last)
        restore_metrics(module, directory)
        if config.rounds < module.counters.rounds:
            raise ValueError(f"rounds={config.rounds}: {module.counters.rounds} are done already.")
    elif start := config.get("start"):
        module.start_cost = load_start_weights(start, module.policy)
    if resumed is not None and is_rank_zero():
        save_config(config, directory, resumed)
    callbacks = build_callbacks(config, directory, console, world)
    for callback in callbacks:
        if callback.state_key in saved:
            callback.load_state_dict(saved[callback.state_key])
    trainer = build_trainer(config, directory, callbacks, module.counters)
    collector = build(
        config.collector, environment=world, run_seed=config.seed, budget=config.decisions,
        listeners=round_listeners(callbacks), _partial_=False,
    )  # fmt: skip
    last.parent.mkdir(parents=True, exist_ok=True)
    print_header(config, directory, console, world, module)
    started = time.perf_counter()
    try:
        with stop_on_signals(collector), detect_lost_rank():
            if not collector.budget_exhausted(module.counters.decisions):
                trainer.fit(module, datamodule=collector)
            if module.validated_round != module.counters.rounds:
                trainer.validate(module, datamodule=collector, verbose=False)
    except (StoppedError, SIGTERMException) as stop:
        reason = str(stop) or "SIGTERM"
        console.print(f"stopped by {reason} after round {module.counters.rounds}; go on with")
        what = f"-m resume={HydraConfig.get().sweep.dir}" if in_sweep() else f"resume={directory}"
        console.print(f"  python -m esper.run {what}", soft_wrap=True)
        if in_sweep():
            raise KeyboardInterrupt from None  # the jobs that wait are not meant to begin
        return module.latest_metrics
    finally:
        world.close()
    if trainer.is_global_zero:
        finish_run(config, directory, console, module, time.perf_counter() - started)
    return module.latest_metrics


def restore_metrics(module: PPO, directory: Path) -> None:
    """The figures of the last round that a resumed run has behind it."""
    for line in RoundWriter(directory).lines():
        if line["round"] == module.counters.rounds:
            numbers = {name: value for name, value in line.items() if "/" in name and value is not None}
            module.latest_metrics.update(numbers)
            if any(name.startswith("validation/") for name in numbers):
                module.validated_round = module.counters.rounds


@contextmanager
def stop_on_signals(collector: Collector) -> Iterator[None]:
    """SIGINT and SIGTERM let the run stop where nothing is half done; a second one, later, ends it at once.

    What stops a group of processes often sends its signal twice in the same moment.
    """
    requested_length = float("inf")

    def request_stop(number: int, frame: object) -> None:
        nonlocal requested_length
        if time.monotonic() > requested_length + PATIENCE:
            raise KeyboardInterrupt
        requested_length = min(requested_length, time.monotonic())
        collector.stop_reason = signal.Signals(number).name

    wanted = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old = {number: signal.getsignal(number) for number in wanted}
    for number, handler in old.items():
        if handler is not signal.SIG_IGN:  # of a job in the background, which Ctrl-C is not meant for
            signal.signal(number, request_stop)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def print_header(config: DictConfig, directory: Path, console: Console, world: VectorEnv, module: PPO) -> None:
    done = module.counters.rounds
    parameters = sum(parameter.numel() for parameter in module.policy.parameters())
    steps = f"{world.envs} episodes of {world.steps} steps"
    console.print(f"run         {directory}", soft_wrap=True)
    console.print(f"device      {config.device} for hosts, {config.trainer.accelerator} for the policy")
    console.print(f"data        {world.name}")
    begun = f"; begins with what {config.start} has learned" if module.start_cost and not done else ""
    console.print(f"policy      {parameters:,} parameters; heads {', '.join(world.layout.head_names)}{begun}")
    until = "" if config.decisions is None else f", or {config.decisions:,} decisions"
    behind = f" ({done} done)" if done else ""
    console.print(f"rounds      {config.rounds - done} to come{behind}, each of {steps}{until}")
    console.print(f"to watch    tensorboard --logdir {directory}", soft_wrap=True)


def finish_run(config: DictConfig, directory: Path, console: Console, module: PPO, seconds: float) -> None:
    """Table, picture, and what to type next."""
    held_out = {name: value for name, value in module.latest_metrics.items() if name.startswith("validation/")}
    records = RoundWriter(directory)
    if any(line["round"] == module.counters.rounds for line in records.lines()):
        rounds = records.amend(held_out)
        console.print(summary_table(rounds, held_out, SHARE))
        draw_rounds(rounds, f"{config.name}, seed {config.seed}", directory / "rounds.png")
    figures = {name: value if math.isfinite(value) else None for name, value in module.latest_metrics.items()}
    summary = {**asdict(module.counters), "requested": requested_length(config), "seconds": seconds, **figures}
    unfinished = directory / "summary.part"
    unfinished.write_text(json.dumps(summary, indent=2, allow_nan=False))
    unfinished.replace(directory / SUMMARY)
    left = [name for name in ("rounds.png", "rounds.jsonl", "summary.json") if (directory / name).exists()]
    console.print(f"{directory}/{', '.join(left)}", soft_wrap=True)
    console.print("next:")
    console.print(f"  tensorboard --logdir {directory}", soft_wrap=True)
    longer = f"rounds={2 * config.rounds}" if config.decisions is None else f"decisions={2 * config.decisions}"
    console.print(f"  python -m esper.run resume={directory} {longer}", soft_wrap=True)
    if grows_hosts(config):
        console.print(f"  python -m esper.evaluate ckpt={directory}", soft_wrap=True)
