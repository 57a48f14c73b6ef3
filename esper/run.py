"""python -m esper.run: train a controller."""

import logging
import sys
import warnings
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console

from esper.checkpoints.resume import merge_overrides, resume_arguments
from esper.config import CONF, check_renamed, remove_empty_run, run_app
from esper.data import DataError
from esper.ppo import DivergedError, RankLostError
from esper.sweeps import in_sweep, is_rank_zero, run_job, summarise_on_failure
from esper.training import train

WIDTH = 120  # columns of what is printed into a file


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
def main(config: DictConfig) -> float | None:
    configure_process()
    console = (
        Console(quiet=not is_rank_zero()) if sys.stdout.isatty() else Console(width=WIDTH, quiet=not is_rank_zero())
    )
    running = HydraConfig.get()
    directory = Path(running.runtime.output_dir)
    if in_sweep():
        overrides = list(running.overrides.task)
        again = {True: overrides, False: None}
        return run_job(config, directory, lambda each, begun: train(each, directory, console, again[begun]))
    try:
        resumed = config.resume is not None
        if resumed:
            config, changes = merge_overrides(config, directory, overrides=running.overrides.task)
            for change in changes:
                console.print(f"changed     {change}", soft_wrap=True)
        figures = train(config, directory, console, list(running.overrides.task) if resumed else None)
    except RankLostError as error:
        sys.exit(f"{error}; go on with python -m esper.run resume={directory}")
    except (ValueError, DataError, DivergedError) as error:
        if not resumed:
            remove_empty_run(directory)
        sys.exit(str(error))
    return figures.get(config.optimized_metric)


def configure_process() -> None:
    torch.set_num_threads(1)  # environments run in threads of their own
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    observer = "lightning.fabric.strategies.launchers.subprocess_script"
    logging.getLogger(observer).setLevel(logging.INFO)  # tells of a rank that died before it ends the others
    warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # Lightning asks torch in a way that will go
    warnings.filterwarnings("ignore", ".*sync_dist=True")  # ranks agree before they log


def cli() -> None:
    try:
        check_renamed(sys.argv[1:])
        sys.argv[1:] = resume_arguments(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    run_app(summarise_on_failure()(main), "run")


if __name__ == "__main__":
    cli()
