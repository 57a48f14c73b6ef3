"""Sweeps: many runs from one command, of which each may fail, be skipped or go on by itself."""

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from esper.checkpoints.runs import list_runs, read_overrides, read_yaml
from esper.config import module_exists, override_key
from esper.data import DataError
from esper.evaluation.training_runs import run_names
from esper.ppo import DivergedError, RankLostError, world_size

FAILED, SUMMARY, SWEEP = "failed.txt", "summary.json", "multirun.yaml"
FREE = (  # keys, or groups of them, in which a sweep that goes on may differ: its jobs stay the same
    "rounds",
    "decisions",
    "sweep.skip_completed",
    "trainer",
    "device",
    "callbacks",
    "logger",
    "environment.threads",
)
RunMetrics = Mapping[str, float]


def in_sweep() -> bool:
    """Whether this process plays one job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def is_rank_zero() -> bool:
    """Whether this is the one process of a distributed run that prints and writes."""
    world_size = [os.environ[name] for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK") if name in os.environ]
    return not world_size or int(world_size[0]) == 0


def print_rank_zero(words: str) -> None:
    if is_rank_zero():
        print(words)


def run_job(config: DictConfig, directory: Path, train: Callable[[DictConfig, bool], RunMetrics]) -> float | None:
    """One run of a sweep; what it came to by `optimized_metric`, or None if it failed.

    `train` is given the configuration and whether it goes on from a checkpoint. Whatever goes wrong is written down,
    to be told at the end of the sweep; the other jobs go on, unless one rank of several has
    failed, which the others would wait for.
    """
    if is_rank_zero():
        (directory / FAILED).unlink(missing_ok=True)
    try:
        check_single_process(config, HydraConfig.get().launcher)
        figures = completed_metrics(config, directory) if config.sweep.skip_completed else None
        if figures is not None:
            print_rank_zero(f"{directory}: finished already")
        else:
            begun = config.sweep.skip_completed and (directory / "checkpoints").is_dir()
            if is_rank_zero():
                (directory / SUMMARY).unlink(missing_ok=True)  # of what is played anew
            figures = train(share_cores(config, HydraConfig.get().launcher), begun)
    except (Exception, SystemExit) as error:
        agreed = isinstance(error, ValueError | SystemExit | DataError | DivergedError)  # which all ranks meet
        why = write_failure(error, directory, plain=agreed or isinstance(error, RankLostError))
        if is_rank_zero():
            print(f"{directory}: failed: {why}", file=sys.stderr)
        if world_size() > 1 and not agreed:
            sys.exit(why)
        return None
    return figures.get(config.optimized_metric)


def write_failure(error: BaseException, directory: Path, plain: bool) -> str:
    """Leave in a directory why its job failed, and where unless that is a `plain` sentence; gives the sentence."""
    why = " ".join((f"{error}" if plain else f"{type(error).__name__}: {error}").split())
    where = "" if plain else "\n" + "".join(traceback.format_exception(error))
    if is_rank_zero():
        (directory / FAILED).write_text(f"{why}\n{where}", encoding="utf-8")
    return why


def completed_metrics(config: DictConfig, directory: Path) -> RunMetrics | None:
    """The figures of a run that has played all it is asked for; None if it has not."""
    try:
        found = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # none, or one that was cut off
    if not isinstance(found, dict):
        return None
    return (
        found if found.get("requested") == requested_length(config) or found.get("rounds", 0) >= config.rounds else None
    )


def requested_length(config: DictConfig) -> dict[str, int | None]:
    """How long a run is meant to be."""
    return {"rounds": config.rounds, "decisions": config.decisions}


def check_same_sweep(directory: Path, config: DictConfig) -> None:
    """Refuse to go on in the directory of another sweep, whose runs would be taken for this one's."""
    found = read_yaml(directory / SWEEP)
    if found is None:
        return
    before, now = sweep_overrides(found.hydra), sweep_overrides(config.hydra)
    if before != now:
        changed = ", ".join(sorted(before ^ now))
        raise ValueError(f"hydra.sweep.dir={directory}: holds another sweep, differing in {changed}; choose another.")


def sweep_overrides(hydra: DictConfig) -> set[str]:
    """What makes a sweep: all that was typed, and what a ready sweep goes over."""
    typed = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    ready = OmegaConf.select(hydra, "sweeper.params") or {}
    every = [*(typed if isinstance(typed, list) else []), *(f"{key}={value}" for key, value in ready.items())]
    return {str(override) for override in every if not override_key(str(override)).startswith(FREE)}


def check_single_process(config: DictConfig, launcher: DictConfig) -> None:
    """Refuse several processes in a job where jobs themselves are processes of a pool."""
    devices = config.trainer.devices
    several = (len(devices) if isinstance(devices, ListConfig) else devices) != 1 or config.trainer.num_nodes != 1
    if several and "joblib" in launcher._target_:
        raise ValueError(
            f"trainer.devices={devices}: the joblib launcher runs jobs of one process each; use the "
            "basic launcher or submitit."
        )


def check_launcher_installed(plugin: str) -> None:
    """Refuse a launcher whose package is not there."""
    package, _, _ = plugin.rpartition(".")
    if not module_exists(package):
        raise ValueError(f"hydra/launcher: {package} is not installed; pip install 'esper[sweep]' brings it.")


def share_cores(config: DictConfig, launcher: DictConfig) -> DictConfig:
    """`config`, with the cores of this machine shared among the jobs that run beside each other."""
    parallel_jobs, given = launcher.get("n_jobs", 1), launcher.get("cpus_per_task")
    if config.environment.get("threads", 1) is not None or (parallel_jobs == 1 and given is None):
        return config
    cores = os.cpu_count() or 1
    share = given or max(1, cores // (cores if parallel_jobs < 0 else parallel_jobs))
    changed = copy.deepcopy(config)
    with open_dict(changed):
        changed.environment.threads = share
    return changed


class SweepCallback(Callback):
    """Refuses a sweep that cannot work before it begins, and tells at its end what became of its jobs."""

    begun: ClassVar[Path | None] = None  # directory of the sweep that this process is in

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
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FAILED).unlink(missing_ok=True)
        OmegaConf.save(config, directory / SWEEP)  # not every sweeper does
        SweepCallback.begun = directory
        if "hydra.sweep.dir" not in map(override_key, sys.argv):
            quoted = str(directory).replace("'", "\\'")
            sys.argv.append(f"hydra.sweep.dir='{quoted}'")  # other ranks are started with the same words, but later

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        SweepCallback.begun = None
        if is_rank_zero() and print_sweep_summary(Path(config.hydra.sweep.dir)):
            sys.exit(1)


def failure_reason(job: Path) -> str | None:
    """Why a job failed, in one line; None if it did not."""
    if (job / FAILED).is_file():
        return (job / FAILED).read_text(encoding="utf-8").partition("\n")[0]
    return None if (job / SUMMARY).is_file() else "it was killed, or still runs"


def print_sweep_summary(directory: Path) -> bool:
    """Print what became of the jobs of a sweep; whether any failed."""
    jobs = [job for job in list_runs(directory) if job != directory]
    known = [(str(job), read_overrides(job)) for job in jobs]
    names = run_names(known) if len(known) > 1 else [" ".join(overrides) for _, overrides in known]
    failed = [f"  {job.relative_to(directory)} failed ({name}): {why}"
              for job, name in zip(jobs, names, strict=True) if (why := failure_reason(job)) is not None]  # fmt: skip
    print(f"{len(jobs) - len(failed)} of {len(jobs)} jobs finished", *failed, sep="\n")
    print(f"next:\n  python -m esper.report {directory}")
    if failed:
        print(f"  python -m esper.run -m resume={directory}")
    return bool(failed)


@contextmanager
def summarise_on_failure() -> Iterator[None]:
    """Whatever goes wrong with a sweep inside, or stops it, what became of its jobs is printed."""
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        directory, SweepCallback.begun = SweepCallback.begun, None
        if directory is None or not is_rank_zero() or not any(job != directory for job in list_runs(directory)):
            raise
        sys.stdout.flush()
        print_sweep_summary(directory)
        if isinstance(error, SystemExit | KeyboardInterrupt | HydraException | OmegaConfBaseException):
            raise
        first, _, _ = write_failure(error, directory, plain=False).partition(". ")
        sys.exit(f"the sweep ended early: {first} ({directory / FAILED} has more).")
