"""What `esper.Grow` costs: processor time of a fit with it, relative to the same fit without it.

    python benchmarks/grow_overhead.py               about five minutes on one core; prints a table
    python benchmarks/grow_overhead.py --repeats 3   faster, less exact

Two ratios. A fit with Grow that plants nothing, to a plain fit: at most 1.02 is the aim. A fit whose seeds are measured
again at validations, to one with the same seeds that are not: at most 1.10. All fits of a repeat follow each other, so
that what else runs on the machine meets them alike; a ratio is the median over the repeats.
"""

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.controllers import ReplayController
from esper.lifecycle import ActionSpace

BATCH, SIZE, CLASSES = 64, 16, 10
STAGES = ("layer1", "layer2", "layer3")


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


class Classifier(LightningModule):
    """A small ResNet in three stages."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.layer1, self.layer2 = Residual(width, width, 1), Residual(width, 2 * width, 2)
        self.layer3, self.head = Residual(2 * width, 4 * width, 2), nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer3(self.layer2(self.layer1(self.stem(x)))).mean((2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        out = self(batch[0])
        self.log("val_loss", F.cross_entropy(out, batch[1]))
        self.log("val_acc", (out.argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def plant_all(space: ActionSpace) -> ReplayController:
    """A controller that plants a seed in each stage, one after each of the first validations."""
    actions = [{"op": "GERMINATE", "slot": slot, "blueprint": "depthwise"} for slot in STAGES]
    return ReplayController(space, [{"op": "WAIT"}, *actions])


ARMS: dict[str, Callable[[], list[Any]]] = {
    "plain": lambda: [],
    "no seeds": lambda: [esper.Grow(STAGES, controller="none", monitor="val_acc", summary=False)],
    "seeds": lambda: [esper.Grow(STAGES, controller=plant_all, monitor="val_acc", summary=False, measure=0)],
    "measured": lambda: [esper.Grow(STAGES, controller=plant_all, monitor="val_acc", summary=False)],
}
RATIOS = (("no seeds", "plain", 1.02), ("measured", "seeds", 1.10))


def make_loader(batches: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH * batches, 3, SIZE, SIZE, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(CLASSES, (len(x),), generator=generator)), batch_size=BATCH)


def time_fit(arm: str, epochs: int, batches: int) -> tuple[float, float]:
    """Processor and wall-clock seconds of one fit."""
    seed_everything(0, verbose=False)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=ARMS[arm](),
    )
    module, train, validation = Classifier(), make_loader(batches, 0), make_loader(max(1, batches // 5), 1)
    processor, wall = time.process_time(), time.perf_counter()
    trainer.fit(module, train, validation)
    return time.process_time() - processor, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batches", type=int, default=40, help="of an epoch; a fifth of them for validation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for arm in ARMS:
        time_fit(arm, 2, 2)  # imports and first calls
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for _ in range(options.repeats):
        for arm in ARMS:
            times[arm].append(time_fit(arm, options.epochs, options.batches))
    table = Table("fit", "to", "processor time", "range", "wall clock", "aim")
    for arm, base, aim in RATIOS:
        pairs = list(zip(times[arm], times[base], strict=True))
        processor = [own[0] / other[0] for own, other in pairs]
        wall = statistics.median(own[1] / other[1] for own, other in pairs)
        spread = f"{min(processor):.3f} to {max(processor):.3f}"
        table.add_row(arm, base, f"{statistics.median(processor):.3f}", spread, f"{wall:.3f}", f"{aim:.2f}")
    Console().print(table)
    seconds = ", ".join(f"{arm} {statistics.median(own[0] for own in found):.1f} s" for arm, found in times.items())
    Console().print(f"Median processor time of a fit: {seconds}")


if __name__ == "__main__":
    main()
