"""Grow a small ResNet on CIFAR-10 at 16x16 while Lightning trains it: about two minutes, and 180 MB fetched once."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.config import load_preset
from esper.data import Data


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.skip(x))


class ResNet(L.LightningModule):
    def __init__(self, classes: int = 10, epochs: int = 10) -> None:
        super().__init__()
        self.epochs, self.stem, self.layer1 = epochs, nn.Conv2d(3, 8, 3, 1, 1), Block(8, 8, 1)
        self.layer2, self.layer3, self.head = Block(8, 16, 2), Block(16, 32, 2), nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer3(self.layer2(self.layer1(self.stem(x)))).mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        accuracy = (self(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log_dict({"val_loss": self.training_step(batch, index), "val_acc": accuracy}, prog_bar=True)

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]


def train(data: Data, epochs: int = 10) -> nn.Module:
    parts = [TensorDataset(*next(data.batches(part, data.size(part)))) for part in ("train", "validation")]
    model = ResNet(epochs=epochs)
    grow = esper.Grow(slots=["layer1", "layer2", "layer3"], monitor="val_acc", mode="max")
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[grow])  # prints what grew at the end
    trainer.fit(model, DataLoader(parts[0], 64, shuffle=True), DataLoader(parts[1], 500))
    x, merged = next(data.batches("test", 500))[0], esper.merge(model).eval()  # an ordinary module, without esper
    print("bit-equal after merging:", torch.equal(merged(x), model.eval()(x)))
    return merged


if __name__ == "__main__":
    train(load_preset("data/cifar10", resolution=16))
