"""python -m esper.evaluate: compare controllers on the same episodes."""

import shlex
import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from esper.app import run_app
from esper.command_line import (
    CONF,
    RECORDS,
    add_task_experiment,
    check_options,
    check_renamed,
    check_unused_directory,
    has_key,
    move_debug_last,
)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="evaluate")
def main(config: DictConfig) -> None:
    import torch

    from esper.checkpoints import apply_trained_values, checkpoint_names
    from esper.checkpoints.resume import EVALUATION, merge_overrides
    from esper.config import remove_empty_run, typed_overrides
    from esper.data import DataError
    from esper.evaluation.output import make_console
    from esper.evaluation.run import evaluate
    from esper.files import OutputError, output_errors

    torch.set_num_threads(1)  # hosts run in their own processes or threads
    console = make_console()
    directory, overrides = Path(HydraConfig.get().runtime.output_dir), typed_overrides()
    is_resumed = config.resume is not None
    try:
        if is_resumed:
            config, changes = merge_overrides(config, directory, EVALUATION, overrides)
            for change in changes:
                console.print(f"changed     {change}", soft_wrap=True)
        else:
            config = apply_trained_values(config, overrides, checkpoint_names(config.ckpt))
        with output_errors(directory, "esper.evaluate", RECORDS):
            evaluate(config, directory, console, f"python {shlex.join(sys.orig_argv[1:])}", overrides)
    except (ValueError, DataError, OutputError) as error:
        if not is_resumed:
            remove_empty_run(directory)
        sys.exit(str(error))


def prepare(arguments: list[str]) -> list[str]:
    """The arguments that Hydra gets: those of a task, a checkpoint or a resumed evaluation are added."""
    check_renamed(arguments)
    check_options(arguments)
    if has_key(arguments, "ckpt"):
        from esper.checkpoints import add_task_overrides, resolve_checkpoint_paths

        arguments = add_task_overrides(resolve_checkpoint_paths(arguments))
    if has_key(arguments, "resume"):
        from esper.checkpoints.resume import EVALUATION, resume_arguments

        arguments = resume_arguments(arguments, EVALUATION)
    else:
        check_unused_directory(arguments)
    return move_debug_last(add_task_experiment(arguments))


def cli() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_app(main, "evaluate", prepare)


if __name__ == "__main__":
    cli()
