"""Lightning's checkpoints: they name the seeds of a network, which are built before their weights."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from esper.grow.additions import CHECKPOINT_KEY, build_additions, describe_additions
from esper.grow.averages import grow_copies
from esper.growth import detach_slots, take_seed_weights


class CheckpointHooks:
    """Extends the checkpoint hooks of one LightningModule, because those of a callback run too late.

    Arguments:
        trainer, module: of the fit, validation, test or prediction
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self.is_fit = trainer.state.fn == "fit"
        self.taken: Mapping[str, Tensor] = {}
        load, save = module.on_load_checkpoint, module.on_save_checkpoint

        def on_load_checkpoint(checkpoint: dict[str, Any]) -> None:
            self._build_seeds(checkpoint)
            load(checkpoint)

        def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
            checkpoint[CHECKPOINT_KEY] = describe_additions(module)
            save(checkpoint)

        module.on_load_checkpoint = on_load_checkpoint  # type: ignore[method-assign]
        module.on_save_checkpoint = on_save_checkpoint  # type: ignore[method-assign]

    def take_seeds(self) -> None:
        """Take the seeds away again, so that optimizers are made for the network without them."""
        self.taken = take_seed_weights(self._module.state_dict())
        detach_slots(self._module)

    def close(self) -> None:
        """Leave the module to itself."""
        del self._module.on_load_checkpoint
        del self._module.on_save_checkpoint

    def _build_seeds(self, checkpoint: Mapping[str, Any]) -> None:
        if CHECKPOINT_KEY in checkpoint:
            build_additions(self._module, checkpoint[CHECKPOINT_KEY], "ckpt_path")
            if self.is_fit:
                grow_copies(self._trainer, self._module)
