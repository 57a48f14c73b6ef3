"""The output directory of a Hydra application: known before Hydra writes into it."""

from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig


class OutputDirectory(Callback):
    """Hydra callback that keeps the directory of the run, since Hydra's errors do not name it."""

    current: ClassVar[Path | None] = None
    is_new: ClassVar[bool] = False  # whether this process creates it

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        OutputDirectory.current = Path(config.hydra.run.dir)
        OutputDirectory.is_new = not OutputDirectory.current.exists()
