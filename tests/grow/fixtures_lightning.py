"""LightningModules that know nothing of esper, their data, and Trainers for them."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from esper.grow.callback import Grow
from tests.grow.fixtures_growers import WAIT, replay
from tests.grow.fixtures_networks import ResNet, images

PLANT = {"op": "GERMINATE", "slot": "net.layer2", "blueprint": "conv_small"}
PRUNE = {"op": "PRUNE", "slot": "net.layer2"}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "log_every_n_steps": 1,
}


class Classifier(LightningModule):
    """Classifies images; logs as most people do. Dropout follows from the step, so that a resumed fit repeats it."""

    def __init__(self, net: nn.Module | None = None, schedule: Any = None, lr: float = 0.05) -> None:
        super().__init__()
        self.net = ResNet() if net is None else net
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.schedule, self.lr = schedule, lr
        self.validated = 0  # batches

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(self.trainer.fit_loop.total_batch_idx)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated += 1
        out = self(batch[0])
        self.accuracy(out, batch[1])
        self.log("val_loss", F.cross_entropy(out, batch[1]))
        self.log("val_acc", self.accuracy)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        weights = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(weights, lr=self.lr, momentum=0.9)
        return optimizer if self.schedule is None else self.schedule(optimizer)


class PowerCutError(Exception):
    """Ends a fit."""


class Interruption(Callback):
    """Ends a fit with an error at the start of an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            raise PowerCutError


def loader(batches: int = 3, seed: int = 0, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*images(8 * batches, seed=seed)), batch_size=8, shuffle=shuffle)


def make_module(kind: type[Classifier] = Classifier, **arguments: Any) -> Classifier:
    seed_everything(0, verbose=False)
    return kind(**arguments)


def make_trainer(root: Path, *callbacks: Any, **options: Any) -> Trainer:
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    own = {"max_epochs": 4, "default_root_dir": root, "callbacks": list(callbacks), "enable_checkpointing": saves}
    return Trainer(**{**QUIET, **own, **options})


def make_grow(*actions: dict[str, str], **options: Any) -> Grow:
    """Grows by a list of actions; by default one seed after the second validation."""
    controller = replay(*(actions or (WAIT, PLANT)))
    return Grow(**{"controller": controller, "monitor": "val_acc", "summary": False, **options})


def fit(module: Classifier, trainer: Trainer, batches: int = 3, **options: Any) -> Classifier:
    seed_everything(1, verbose=False)
    trainer.fit(module, loader(batches), loader(2, seed=7), **options)
    return module


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    """Whether two networks have the same weights, bit for bit."""
    one, two = first.state_dict(), second.state_dict()
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)
