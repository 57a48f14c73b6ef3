"""python -m esper.evaluate: compare controllers on the same episodes."""

import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from esper.checkpoints import add_task_overrides, apply_trained_values, checkpoint_names, resolve_checkpoint_paths
from esper.checkpoints.resume import EVALUATION, merge_overrides, resume_arguments
from esper.config import CONF, check_renamed, override_key, remove_empty_run, run_app
from esper.data import DataError
from esper.evaluation.output import make_console
from esper.evaluation.run import evaluate
from esper.files import OutputError, output_errors


def check_unused_directory(arguments: Sequence[str]) -> None:
    """Refuse a directory with another evaluation, before Hydra writes into it."""
    typed = {override_key(argument): argument.partition("=")[2].strip("'") for argument in arguments}
    directory = Path(typed.get("hydra.run.dir", ""))
    if "hydra.run.dir" in typed and "resume" not in typed and (directory / EVALUATION.file).exists():
        raise ValueError(
            f"hydra.run.dir={directory}: must be a directory without an evaluation; resume={directory} continues it."
        )


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="evaluate")
def main(config: DictConfig) -> None:
    torch.set_num_threads(1)  # environments run in threads of their own
    console = make_console()
    hydra_config = HydraConfig.get()
    directory, overrides = Path(hydra_config.runtime.output_dir), list(hydra_config.overrides.task)
    is_resumed = config.resume is not None
    try:
        if is_resumed:
            config, changes = merge_overrides(config, directory, EVALUATION, overrides)
            for change in changes:
                console.print(f"changed     {change}", soft_wrap=True)
        else:
            config = apply_trained_values(config, overrides, checkpoint_names(config.ckpt))
        with output_errors(directory, "esper.evaluate", EVALUATION.file):
            evaluate(config, directory, console, f"python {shlex.join(sys.orig_argv[1:])}", overrides)
    except (ValueError, DataError, OutputError) as error:
        if not is_resumed:
            remove_empty_run(directory)
        sys.exit(str(error))


def cli() -> None:
    try:
        check_renamed(sys.argv[1:])
        arguments = resume_arguments(add_task_overrides(resolve_checkpoint_paths(sys.argv[1:])), EVALUATION)
        check_unused_directory(arguments)
    except ValueError as error:
        sys.exit(str(error))
    sys.argv[1:] = arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_app(main, "evaluate")


if __name__ == "__main__":
    cli()
