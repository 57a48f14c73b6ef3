"""A fit with two processes that grows, for tests to compare: `python -m tests.grow.train_ranks DIRECTORY [CKPT]`."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.parallel import DistributedDataParallel

from tests.grow.fixtures_growers import WAIT
from tests.grow.fixtures_lightning import PLANT, Classifier, fit, make_grow, make_module, make_trainer

PRUNE_OTHER = {"op": "PRUNE", "slot": "net.layer1"}
COURSE = (WAIT, PLANT, {**PLANT, "slot": "net.layer1"}, WAIT, PRUNE_OTHER)


class Watch(Callback):
    """Notes, for each batch, the loss of this process and whether its wrapper knows all parameters."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.are_wrapped: list[bool] = []
        self.gradients_agree: list[bool] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        wrapper = trainer.strategy.model
        assert isinstance(wrapper, DistributedDataParallel)
        self.losses.append(outputs["loss"].item())
        self.are_wrapped.append(wrapper.module is pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        own = torch.cat([p.grad.flatten() for p in pl_module.parameters() if p.grad is not None])
        both = pl_module.all_gather(own)
        self.gradients_agree.append(bool(torch.equal(both[0], both[1])))


def main(directory: Path, checkpoint: Path | None) -> None:
    torch.set_num_threads(1)
    grow = make_grow(*COURSE, measure=1.0, measure_share=1.0, summary=True)
    watch = Watch()
    save = ModelCheckpoint(directory / "saved", filename="{epoch}", save_top_k=-1)
    trainer = make_trainer(directory, grow, watch, save, strategy="ddp", devices=2, max_epochs=6)
    module: Classifier = fit(make_module(lr=0.2), trainer, batches=4, ckpt_path=checkpoint)
    record = {
        "state": module.state_dict(),
        "losses": watch.losses,
        "wrapped": watch.are_wrapped,
        "agree": watch.gradients_agree,
        "history": repr(grow.history),
        "seeds": [seed["slot"] for seed in grow.grower.summary()],
        "flops": grow.grower.flops,
    }
    torch.save(record, directory / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
