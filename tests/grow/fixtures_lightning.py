"""LightningModules that know nothing of esper, their data, and Trainers for them."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from esper.grow.callback import Grow
from tests.grow.fixtures_growers import GROW, WAIT, replay
from tests.grow.fixtures_networks import ResNet, images

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "enable_checkpointing": False,
    "log_every_n_steps": 1,
}


class Classifier(LightningModule):
    """Classifies images; logs as most people do."""

    def __init__(self, net: nn.Module | None = None, schedule: Any = None, lr: float = 0.05) -> None:
        super().__init__()
        self.net = ResNet() if net is None else net
        self.accuracy = MulticlassAccuracy(4, average="micro")
        self.schedule, self.lr = schedule, lr
        self.validated = 0  # batches

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

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

    def configure_optimizers(self) -> Any:
        weights = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(weights, lr=self.lr, momentum=0.9)
        return optimizer if self.schedule is None else self.schedule(optimizer)


def loader(batches: int = 3, seed: int = 0, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*images(8 * batches, seed=seed)), batch_size=8, shuffle=shuffle)


def make_module(kind: type[Classifier] = Classifier, **arguments: Any) -> Classifier:
    seed_everything(0, verbose=False)
    return kind(**arguments)


def make_trainer(root: Path, *callbacks: Any, **options: Any) -> Trainer:
    return Trainer(**{**QUIET, "max_epochs": 4, "default_root_dir": root, "callbacks": list(callbacks), **options})


def make_grow(*actions: dict[str, str], **options: Any) -> Grow:
    """Grows by a list of actions; by default one seed after the first validation."""
    controller = replay(*(actions or (WAIT, GROW)))
    return Grow(**{"controller": controller, "monitor": "val_acc", **options})


def fit(module: Classifier, trainer: Trainer, **options: Any) -> Classifier:
    seed_everything(1, verbose=False)
    trainer.fit(module, loader(shuffle=True), loader(2, seed=7), **options)
    return module


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    """Whether two networks have the same weights, bit for bit."""
    one, two = first.state_dict(), second.state_dict()
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)
