"""python -m esper.tune: tune the numbers of a rule on training tasks."""

import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from esper.app import run_app
from esper.command_line import CONF, check_options, check_renamed, has_key, move_debug_last


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="tune")
def main(config: DictConfig) -> None:
    import torch

    from esper.checkpoints.resume import TUNING, merge_overrides
    from esper.config import remove_empty_run, typed_overrides
    from esper.data import DataError
    from esper.environment import WorkerLostError
    from esper.evaluation.output import make_console
    from esper.files import OutputError, output_errors
    from esper.plugins import check_optional_package

    torch.set_num_threads(1)  # hosts run in their own processes or threads
    console = make_console()
    directory, overrides = Path(HydraConfig.get().runtime.output_dir), typed_overrides()
    is_resumed = config.resume is not None
    try:
        check_optional_package("esper.tuning.tune", "esper.tune")
        from esper.tuning import TUNING_RECORDS, tune

        if is_resumed:
            config, changes = merge_overrides(config, directory, TUNING, overrides)
            for change in changes:
                console.print(f"changed     {change}", soft_wrap=True)
        elif (directory / TUNING_RECORDS).exists():
            raise ValueError(
                f"hydra.run.dir={directory}: must be a directory without a search; resume={directory} continues it."
            )
        with output_errors(directory, "esper.tune", TUNING_RECORDS):
            tune(config, directory, console, overrides)
    except WorkerLostError as error:
        sys.exit(f"{error}; resume with python -m esper.tune resume={directory}")
    except (ValueError, DataError, OutputError) as error:
        if not is_resumed:
            remove_empty_run(directory)
        sys.exit(str(error))


def prepare(arguments: list[str]) -> list[str]:
    """The arguments that Hydra gets: those of a resumed search are added, `debug` comes last."""
    check_renamed(arguments)
    check_options(arguments)
    if not has_key(arguments, "resume"):
        return move_debug_last(arguments)
    from esper.checkpoints.resume import TUNING, resume_arguments

    return resume_arguments(arguments, TUNING)


def cli() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_app(main, "tune", prepare)


if __name__ == "__main__":
    cli()
