"""Sweeps: many runs from one command. Each job fails, is skipped or is resumed independently of the others."""

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from esper.checkpoints.runs import list_runs, read_overrides, read_yaml
from esper.command_line import override_key
from esper.config import module_exists
from esper.data import DataError
from esper.environment import WorkerLostError, available_cores
from esper.evaluation.training_runs import run_names
from esper.files import OutputError, describe_os_error, output_errors, write_file
from esper.ppo import DivergedError, RankLostError, world_size
from esper.renames import SUMMARY_KEYS, renamed_override

LOST = RankLostError | WorkerLostError | OutputError  # the job failed by no fault of its own
FAILED, SUMMARY, SWEEP_CONFIG = "failed.txt", "summary.json", "multirun.yaml"
CHANGEABLE = (  # keys and groups that a resumed sweep may change, since its jobs remain the same
    "rounds",
    "decisions",
    "sweep.skip_completed",
    "trainer",
    "device",
    "callbacks",
    "logger",
    "environment.threads",
    "environment.workers",
)
SWEEP_DIRECTORY = "ESPER_SWEEP_DIRECTORY"  # environment variable, read by conf/run.yaml
RunMetrics = Mapping[str, float]


def in_sweep() -> bool:
    """Whether this process runs a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def is_rank_zero() -> bool:
    """Whether this is the process of a distributed run that prints and writes."""
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def run_job(config: DictConfig, directory: Path, train: Callable[[DictConfig, bool], RunMetrics]) -> float | None:
    """Run one job of a sweep and return its `optimized_metric`, or None if it failed.

    `train` takes the configuration and whether to resume from a checkpoint. An error is written to the job's directory
    and printed in the summary of the sweep; the other jobs continue. If only one of several ranks fails, the process
    ends, since the other ranks would wait for it.
    """
    if is_rank_zero():
        (directory / FAILED).unlink(missing_ok=True)
    try:
        check_single_process(config, HydraConfig.get().launcher)
        metrics = completed_metrics(config, directory) if config.sweep.skip_completed else None
        if metrics is not None:
            rank_zero_only(print)(f"{directory}: finished already")
        else:
            resume = config.sweep.skip_completed and (directory / "checkpoints").is_dir()
            if is_rank_zero():
                (directory / SUMMARY).unlink(missing_ok=True)  # of an earlier run in this directory
            with output_errors(directory):
                metrics = train(config, resume)
    except (Exception, SystemExit) as error:
        on_all_ranks = isinstance(error, ValueError | SystemExit | DataError | DivergedError)
        reason = write_failure(error, directory, plain=on_all_ranks or isinstance(error, LOST))
        if is_rank_zero():
            print(f"{directory}: failed: {reason}", file=sys.stderr)
        if world_size() > 1 and not on_all_ranks:
            sys.exit(reason)
        return None
    return metrics.get(config.optimized_metric)


def write_failure(error: BaseException, directory: Path, plain: bool) -> str:
    """Write why a job failed into its directory and return the reason as one line.

    A `plain` error is a sentence for the user; others are written with type and traceback.
    """
    reason = " ".join((f"{error}" if plain else f"{type(error).__name__}: {error}").split())
    trace = "" if plain else "\n" + "".join(traceback.format_exception(error))
    if is_rank_zero():
        with suppress(OSError):  # the disk may be full; the reason is printed too
            (directory / FAILED).write_text(f"{reason}\n{trace}", encoding="utf-8")
    return reason


def completed_metrics(config: DictConfig, directory: Path) -> RunMetrics | None:
    """The metrics of a run that has its requested length; None if it has not."""
    try:
        summary = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # missing or truncated
    if not isinstance(summary, dict):
        return None
    metrics = {SUMMARY_KEYS.get(str(key), str(key)): value for key, value in summary.items()}
    is_complete = metrics.get("requested") == requested_length(config) or metrics.get("rounds", 0) >= config.rounds
    return metrics if is_complete else None


def requested_length(config: DictConfig) -> dict[str, int | None]:
    """The length of a run by its configuration."""
    return {"rounds": config.rounds, "decisions": config.decisions}


def check_same_sweep(directory: Path, config: DictConfig) -> None:
    """Refuse the directory of another sweep, whose jobs would be taken for those of this one."""
    saved = read_yaml(directory / SWEEP_CONFIG)
    if saved is None:
        return
    before, now = sweep_overrides(saved.hydra), sweep_overrides(config.hydra)
    if before != now:
        changed = ", ".join(sorted(before ^ now))
        raise ValueError(
            f"hydra.sweep.dir={directory}: has another sweep, which differs in {changed}; choose another directory."
        )


def sweep_overrides(hydra: DictConfig) -> set[str]:
    """The overrides that define a sweep: those of the command line, and the parameters of a `+sweep=` preset."""
    typed = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    params = OmegaConf.select(hydra, "sweeper.params") or {}
    both = [*(typed if isinstance(typed, list) else []), *(f"{key}={value}" for key, value in params.items())]
    overrides = [renamed_override(str(override)) for override in both]
    return {override for override in overrides if not override_key(override).startswith(CHANGEABLE)}


def check_single_process(config: DictConfig, launcher: DictConfig) -> None:
    """Refuse jobs of several processes under joblib, where each job is a process of a pool."""
    devices = config.trainer.devices
    several = (len(devices) if isinstance(devices, ListConfig) else devices) != 1 or config.trainer.num_nodes != 1
    if several and "joblib" in launcher._target_:
        raise ValueError(
            f"trainer.devices={devices}, trainer.num_nodes={config.trainer.num_nodes}: must both be 1 for the joblib "
            "launcher, whose jobs have one process each; use the basic launcher or submitit."
        )


def check_launcher_installed(plugin: str) -> None:
    """Refuse a launcher whose package is not installed."""
    package, _, _ = plugin.rpartition(".")
    if not module_exists(package):
        raise ValueError(f"hydra/launcher: {package} is not installed; pip install 'esper[sweep]' installs it.")


def share_cores(config: DictConfig, launcher: Mapping[str, Any]) -> DictConfig:
    """`config` with workers and threads set to this process's share of the cores, if others run next to it.

    Others are jobs of the same sweep, if its `launcher` runs them in parallel, and other ranks of a distributed run.
    """
    devices, cores = config.trainer.devices, launcher.get("cpus_per_task")  # of each rank
    if cores is None:
        jobs, ranks = launcher.get("n_jobs", 1), devices if isinstance(devices, int) and devices > 1 else 1
        cores = available_cores() // (ranks * jobs) if jobs > 0 else 1
        if ranks * jobs == 1:
            return config
    share = max(1, cores)
    changed = copy.deepcopy(config)
    with open_dict(changed):
        is_on_cpu = str(config.device).startswith("cpu")
        for key, value in (("workers", share if share > 1 and is_on_cpu else 0), ("threads", share)):
            if config.environment.get(key, "absent") is None:
                changed.environment[key] = value
    return changed


class SweepCallback(Callback):
    """Hydra callback: refuses a sweep that cannot run before it begins, and prints a summary of its jobs at the end."""

    current: ClassVar[Path | None] = None  # directory of the sweep that runs in this process

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not is_rank_zero():
            return
        directory = Path(config.hydra.sweep.dir)
        try:
            check_launcher_installed(config.hydra.launcher._target_)
            check_single_process(config, config.hydra.launcher)
            check_same_sweep(directory, config)
        except ValueError as error:
            sys.exit(str(error))
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / FAILED).unlink(missing_ok=True)
            write_file(directory / SWEEP_CONFIG, OmegaConf.to_yaml(config))  # not every sweeper writes it
        except OSError as error:
            sys.exit(describe_os_error(error, directory))
        SweepCallback.current = directory
        os.environ[SWEEP_DIRECTORY] = str(directory)  # other ranks start later, and the time in its name has changed

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        SweepCallback.current = None
        os.environ.pop(SWEEP_DIRECTORY, None)
        if is_rank_zero() and print_sweep_summary(Path(config.hydra.sweep.dir)):
            sys.exit(1)


def failure_reason(job: Path) -> str | None:
    """Why a job failed, as one line; None if it did not fail."""
    if (job / FAILED).is_file():
        return (job / FAILED).read_text(encoding="utf-8").partition("\n")[0]
    return None if (job / SUMMARY).is_file() else "it was killed or is still running"


def print_sweep_summary(directory: Path) -> bool:
    """Print how many jobs of a sweep finished, which failed and why; returns whether any failed."""
    jobs = [job for job in list_runs(directory) if job != directory]
    typed = [(str(job), read_overrides(job)) for job in jobs]
    names = run_names(typed) if len(typed) > 1 else [" ".join(overrides) for _, overrides in typed]
    failed = [
        f"  {job.relative_to(directory)} failed ({name}): {reason}"
        for job, name in zip(jobs, names, strict=True)
        if (reason := failure_reason(job)) is not None
    ]
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs finished", *failed, sep="\n")
    print(f"next:\n  python -m esper.report {directory}")
    if failed:
        print(f"  python -m esper.run -m resume={directory}")
    return bool(failed)


@contextmanager
def summarise_on_failure() -> Iterator[None]:
    """Print the summary of a sweep that an error or a signal ends early."""
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        os.environ.pop(SWEEP_DIRECTORY, None)
        directory, SweepCallback.current = SweepCallback.current, None
        if directory is None or not is_rank_zero() or not any(job != directory for job in list_runs(directory)):
            raise
        sys.stdout.flush()
        print_sweep_summary(directory)
        if isinstance(error, SystemExit | KeyboardInterrupt | HydraException | OmegaConfBaseException):
            raise
        if isinstance(error, OSError):
            sys.exit(f"the sweep ended early: {describe_os_error(error, directory)}")
        reason, _, _ = write_failure(error, directory, plain=False).partition(". ")
        sys.exit(f"the sweep ended early: {reason} ({directory / FAILED} has the traceback).")
