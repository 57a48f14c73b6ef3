"""Build, fit and summarise one training run."""

import json
import logging
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
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
    known_tasks,
    task_specs,
)
from esper.config.loggers import RunLoggers, build_loggers, check_loggers
from esper.environment import Environment, TaskOracle
from esper.files import write_file
from esper.ppo import (
    LAST,
    PPO,
    AtomicCheckpointIO,
    Collector,
    Counters,
    DecisionBudget,
    RoundListener,
    StoppedError,
    VectorEnv,
    check_fits,
    clone_plans,
    detect_lost_rank,
    listed_gains,
    oracle_gains,
    read_checkpoint,
    round_steps,
    task_features,
)
from esper.ppo.teachers import TaskGains, TaskVectorEnv
from esper.rng import derive_seed, seeded_init
from esper.sweeps import SUMMARY, in_sweep, requested_length, share_cores
from esper.telemetry import DetailWindow, EpisodeBuffer, ProgressDisplay, RoundWriter, draw_rounds, summary_table

PLANS = "plans"  # value of `start`: clone what is known of the training tasks
REPEAT_SECONDS = 1.0  # process managers often send a signal twice; a later one means to stop at once
SUMMARY_SHARE = 0.1  # of all rounds: the first and the last ones that the summary averages over


def configure_process() -> None:
    """Set threads, log levels and warning filters."""
    torch.set_num_threads(1)  # hosts run in their own processes or threads
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning uses an API that torch deprecates
    warnings.filterwarnings("ignore", ".*sync_dist=True")  # metrics are reduced over ranks before they are logged


def build_module(config: DictConfig, env: VectorEnv) -> PPO:
    """The LightningModule; the policy's first weights are derived from `seed`."""
    with seeded_init(derive_seed("policy", config.seed)):
        policy = build(config.policy, layout=env.layout, _partial_=False)
    return PPO(policy, build(config.ppo), config.seed, task_features(env))


def plan_gains(config: DictConfig, env: VectorEnv) -> TaskGains:
    """What plans gain on the training tasks, by task number: from the shipped list, or from the oracle itself."""
    if isinstance(env, TaskOracle):
        return oracle_gains(env)
    tasks = known_tasks(config, any_share=True)
    if isinstance(env, Environment) and tasks.tasks:
        names = env.host_pool.names
        found = {spec.name: tasks.find(spec) for spec in task_specs(config) if spec.split == "train"}
        known = {names.index(name): task for name, task in found.items() if task is not None}
        if gains := listed_gains(known, env.space.blueprints):
            return gains
    raise ValueError(
        f"start={PLANS}: needs known plans of the training tasks, but tasks={tasks.name} has none with these settings; "
        "python -m esper.tasks NAME --headroom --write measures those of a distribution; start=null starts from chance."
    )


def clone_known_plans(config: DictConfig, env: TaskVectorEnv, module: PPO) -> dict[str, float | None]:
    """Start from known plans; returns what that cost, the search for the plans included."""
    cost = clone_plans(module.policy, env, plan_gains(config, env), module.settings, config.seed)
    search = known_tasks(config, any_share=True).costs.get("train", {})
    return {key: None if value is None else value + search.get(key, 0) for key, value in cost.items()}


def build_callbacks(config: DictConfig, directory: Path, console: Console, env: VectorEnv) -> list[Callback]:
    """The callbacks that are switched on; each gets those of the offered objects that its signature has."""
    available = {
        "directory": directory,
        "console": console,
        "rounds": config.rounds,
        "decisions": config.decisions,
        "settings": {**chosen_options(), **flatten(config)},
        "detail_window": DetailWindow(),
        "episodes": EpisodeBuffer(env) if isinstance(env, Environment) else None,
    }
    special = {"checkpoints": {**available, "directory": directory / "checkpoints"}}
    enabled = {name: node for name, node in config.callbacks.items() if node is not None}
    callbacks = [build_with(node, **special.get(str(name), available)) for name, node in enabled.items()]
    if config.decisions is not None:
        callbacks.append(DecisionBudget(config.decisions, round_decisions=env.envs * max(round_steps(env))))
    return callbacks


def round_listeners(callbacks: Sequence[Callback]) -> list[RoundListener]:
    """The listeners of rounds: the episode buffers of the callbacks, and the progress display."""
    found = (getattr(callback, "episode_buffer", None) for callback in callbacks)
    buffers = {id(buffer): buffer for buffer in found if buffer is not None}
    return [*buffers.values(), *[callback for callback in callbacks if isinstance(callback, ProgressDisplay)]]


def build_trainer(config: DictConfig, directory: Path, callbacks: list[Callback], loggers: RunLoggers) -> Trainer:
    """The Trainer of a run, new or resumed."""
    available = {"directory": directory, "dirpath": str(directory), "device": torch.device(config.device)}
    trainer: Trainer = build(  # one round is one Lightning epoch
        config.trainer,
        max_epochs=config.rounds,
        callbacks=[*callbacks, loggers.ids],
        logger=list(loggers.loggers.values()) or False,
        plugins=[AtomicCheckpointIO()],
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        profiler=build_with(config.profiler, **available) if "_target_" in config.profiler else None,
        check_val_every_n_epoch=config.validate_every or config.rounds + 1,
        default_root_dir=str(directory),
        _partial_=False,
    )
    return trainer


def train(
    config: DictConfig, directory: Path, console: Console, resumed: Sequence[str] | None = None
) -> dict[str, float]:
    """Train a controller and return its last metrics; checkpoints, metrics and plots are written into `directory`.

    `resumed` has all overrides of a resumed run; None starts a new one.
    """
    check_training_config(config)
    check_loggers(config)
    env = build_vector_env(share_cores(config, HydraConfig.get().launcher if in_sweep() else {}))
    module = build_module(config, env)
    if isinstance(env, Environment) and env.is_budgeted:
        env.controller_flops = module.policy.flops
    last, done = directory / "checkpoints" / LAST, Counters()
    is_resumed = resumed is not None and last.exists()
    if is_resumed:
        done = check_checkpoint(config, module, last)
        restore_metrics(module, directory, done.rounds)
    elif config.get("start") == PLANS:
        module.start_cost = clone_known_plans(config, env, module)
    elif start := config.get("start"):
        module.start_cost = load_start_weights(start, module.policy)
    if resumed is not None:
        rank_zero_only(save_config)(config, directory, resumed)
    callbacks = build_callbacks(config, directory, console, env)
    loggers = build_loggers(config, directory, done.rounds, done.decisions)
    trainer = build_trainer(config, directory, callbacks, loggers)
    collector = build(
        config.collector, environment=env, policy=module.policy, counters=module.counters, run_seed=config.seed,
        listeners=round_listeners(callbacks), _partial_=False,
    )  # fmt: skip
    last.parent.mkdir(parents=True, exist_ok=True)
    print_header(config, directory, console, env, module, done.rounds, loggers)
    started = time.perf_counter()
    try:
        with stop_on_signals(collector), detect_lost_rank():
            trainer.fit(module, datamodule=collector, ckpt_path=last if is_resumed else None, weights_only=True)
            if module.validated_round != module.counters.rounds:
                trainer.validate(module, datamodule=collector, verbose=False)
    except (StoppedError, SIGTERMException) as stop:
        reason = str(stop) or "SIGTERM"
        console.print(f"stopped by {reason} after round {module.counters.rounds}; resume with")
        arguments = f"-m resume={HydraConfig.get().sweep.dir}" if in_sweep() else f"resume={directory}"
        console.print(f"  python -m esper.run {arguments}", soft_wrap=True)
        if in_sweep():
            raise KeyboardInterrupt from None  # later jobs must not begin
        return module.latest_metrics
    finally:
        env.close()
        loggers.close(failed=sys.exception() is not None)
    finish_run(config, directory, console, module, loggers.commands, time.perf_counter() - started)
    return module.latest_metrics


def check_checkpoint(config: DictConfig, module: PPO, path: Path) -> Counters:
    """Refuse a checkpoint that this run cannot continue from, before anything is written; return its progress."""
    saved = read_checkpoint(path).metadata
    check_fits(saved, module.policy, path, module.critic)
    if config.rounds < saved.counters.rounds:
        raise ValueError(f"rounds={config.rounds}: must be at least {saved.counters.rounds}, the rounds done.")
    return saved.counters


def restore_metrics(module: PPO, directory: Path, done: int) -> None:
    """Restore the metrics of a resumed run's last round from rounds.jsonl."""
    for line in RoundWriter(directory).lines():
        if line["round"] == done:
            numbers = {name: value for name, value in line.items() if "/" in name and value is not None}
            module.latest_metrics.update(numbers)
            if any(name.startswith("validation/") for name in numbers):
                module.validated_round = done


@contextmanager
def stop_on_signals(collector: Collector) -> Iterator[None]:
    """Stop a run after its current step on SIGINT or SIGTERM; a second signal, after a moment, stops it at once."""
    first_signal = float("inf")

    def request_stop(number: int, frame: object) -> None:
        nonlocal first_signal
        if time.monotonic() > first_signal + REPEAT_SECONDS:
            raise KeyboardInterrupt
        first_signal = min(first_signal, time.monotonic())
        collector.stop_reason = signal.Signals(number).name

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    old = {number: signal.getsignal(number) for number in numbers}
    for number, handler in old.items():
        if handler is not signal.SIG_IGN:  # background jobs of a shell ignore Ctrl-C
            signal.signal(number, request_stop)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def print_header(
    config: DictConfig, directory: Path, console: Console, env: VectorEnv, module: PPO, done: int, loggers: RunLoggers
) -> None:
    """Print directory, devices, data, policy and length of a run that has `done` rounds, and where to watch it."""
    parameters = sum(parameter.numel() for parameter in module.policy.parameters())
    round_length = f"{env.envs} episodes of {' or '.join(map(str, round_steps(env)))} steps"
    console.print(f"run         {directory}", soft_wrap=True)
    console.print(f"device      {config.device} for hosts, {config.trainer.accelerator} for the policy")
    console.print(f"data        {env.name}")
    source = "a clone of known plans" if config.get("start") == PLANS else f"the weights of {config.get('start')}"
    start = f"; starts with {source}" if module.start_cost and not done else ""
    console.print(f"policy      {parameters:,} parameters; heads {', '.join(env.layout.head_names)}{start}")
    limit = "" if config.decisions is None else f", at most {config.decisions:,} decisions in all"
    finished = f" ({done} done)" if done else ""
    console.print(f"rounds      {config.rounds - done} to come{finished}, each of {round_length}{limit}")
    for line in loggers.access_lines:
        console.print(f"to watch    {line}", soft_wrap=True)


@rank_zero_only
def finish_run(
    config: DictConfig, directory: Path, console: Console, module: PPO, commands: Sequence[str], seconds: float
) -> None:
    """Print the summary table and the next commands, those of loggers first; write summary.json and rounds.png."""
    held_out = {name: value for name, value in module.latest_metrics.items() if name.startswith("validation/")}
    records = RoundWriter(directory)
    if any(line["round"] == module.counters.rounds for line in records.lines()):
        rounds = records.amend(held_out)
        console.print(summary_table(rounds, held_out, SUMMARY_SHARE))
        draw_rounds(rounds, f"{config.name}, seed {config.seed}", directory / "rounds.png")
    metrics = {name: value if math.isfinite(value) else None for name, value in module.latest_metrics.items()}
    summary = {**asdict(module.counters), "requested": requested_length(config), "seconds": seconds, **metrics}
    write_file(directory / SUMMARY, json.dumps(summary, indent=2, allow_nan=False))
    files = [name for name in ("rounds.png", "rounds.jsonl", SUMMARY) if (directory / name).exists()]
    console.print(f"{directory}/{', '.join(files)}", soft_wrap=True)
    console.print("next:")
    for command in commands:
        console.print(f"  {command}", soft_wrap=True)
    longer = f"rounds={2 * config.rounds}" if config.decisions is None else f"decisions={2 * config.decisions}"
    console.print(f"  python -m esper.run resume={directory} {longer}", soft_wrap=True)
    if grows_hosts(config):
        console.print(f"  python -m esper.evaluate ckpt={directory}", soft_wrap=True)
