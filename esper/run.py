"""python -m esper.run: train a controller."""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from esper.app import run_app
from esper.command_line import CONF, check_options, check_renamed, has_key, move_debug_last

FILE_WIDTH = 120  # columns, if the output is not a terminal


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="run")
def main(config: DictConfig) -> float | None:
    """Train a controller and return `optimized_metric` to the sweeper."""
    from rich.console import Console

    from esper.checkpoints.resume import merge_overrides
    from esper.config import remove_empty_run, typed_overrides
    from esper.data import DataError
    from esper.environment import WorkerLostError
    from esper.files import OutputError, output_errors
    from esper.ppo import LAST, DivergedError, RankLostError
    from esper.sweeps import in_sweep, is_rank_zero, run_job
    from esper.training import configure_process, train

    configure_process()
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH, quiet=not is_rank_zero())
    directory, overrides = Path(HydraConfig.get().runtime.output_dir), typed_overrides()
    if in_sweep():
        return run_job(
            config, directory, lambda job, resume: train(job, directory, console, overrides if resume else None)
        )
    resumed = config.resume is not None
    try:
        if resumed:
            config, changes = merge_overrides(config, directory, overrides=overrides)
            for change in changes:
                console.print(f"changed     {change}", soft_wrap=True)
        with output_errors(directory, "esper.run", f"checkpoints/{LAST}"):
            metrics = train(config, directory, console, overrides if resumed else None)
    except (RankLostError, WorkerLostError) as error:
        sys.exit(f"{error}; resume with python -m esper.run resume={directory}")
    except (ValueError, DataError, DivergedError, OutputError) as error:
        if not resumed:
            remove_empty_run(directory)
        sys.exit(str(error))
    return metrics.get(config.optimized_metric)


def prepare(arguments: list[str]) -> list[str]:
    """The arguments that Hydra gets: those of a resumed run or sweep are added, `debug` comes last."""
    check_renamed(arguments)
    check_options(arguments)
    if not has_key(arguments, "resume"):
        return move_debug_last(arguments)
    from esper.checkpoints.resume import resume_arguments

    return resume_arguments(arguments)


def start() -> None:
    from esper.sweeps import summarise_on_failure

    with summarise_on_failure():
        main()


def cli() -> None:
    run_app(start, "run", prepare)


if __name__ == "__main__":
    cli()
