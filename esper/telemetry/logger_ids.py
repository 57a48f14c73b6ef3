"""The ids that tracking services give a run."""

import json
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

from esper.files import write_file
from esper.telemetry.loggers import adapt

LOGGER_IDS = "loggers.json"  # in the directory of a run


class LoggerIds(Callback):
    """Starts the loggers and saves the ids that their services gave the run, so that a resumed run continues it.

    Arguments:
        directory: directory of the run
        names: the names of the Trainer's loggers, in order
    """

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._path, self._names = directory / LOGGER_IDS, list(names)

    @rank_zero_only
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        adapters = dict(zip(self._names, adapt(trainer.loggers), strict=True))
        for adapter in adapters.values():
            adapter.start()
        ids = {name: adapter.run_id for name, adapter in adapters.items() if adapter.run_id}
        if ids:
            write_file(self._path, json.dumps({**read_ids(self._path.parent), **ids}, indent=2))


def read_ids(directory: Path) -> dict[str, str]:
    """The ids of a run at tracking services, by logger."""
    path = directory / LOGGER_IDS
    ids: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    return ids
