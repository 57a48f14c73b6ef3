"""Grow the ResNet of grow_your_own.py in a plain training loop, without Lightning's Trainer.

python examples/plain_loop.py      about a minute on one core; fetches CIFAR-10 once, 180 MB
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from grow_your_own import ResNet
from torch import nn

import esper
from esper.config import load_preset
from esper.data import Data


@torch.no_grad()
def validate(model: nn.Module, data: Data, batches: int) -> tuple[float, float]:
    """Loss and accuracy on the first batches of 500 validation images."""
    model.eval()
    losses, hits = [], []
    for _, (x, y) in zip(range(batches), data.batches("validation", 500), strict=False):
        out = model(x)
        losses.append(F.cross_entropy(out, y).item())
        hits.append((out.argmax(1) == y).float().mean().item())
    model.train()
    return sum(losses) / len(losses), sum(hits) / len(hits)


def train(data: Data, epochs: int = 10, batch: int = 64) -> nn.Module:
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    stream = data.stream(batch, torch.Generator().manual_seed(0))
    grower = esper.Grower(
        model,
        optimizer,
        schedulers=scheduler,
        slots=["layer1", "layer2", "layer3"],
        example=stream.next(),
        steps=epochs,
    )
    for epoch in range(epochs):
        total = 0.0
        for _ in range(data.size("train") // batch):
            x, y = stream.next()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        val_loss, accuracy = validate(model, data, 10)
        grower.step(
            train_loss=total / (data.size("train") // batch),
            val_loss=val_loss,
            score=accuracy,
            evaluate=lambda: validate(model, data, 2),  # runs again without each seed
        )
        print(f"{epoch + 1:>2}  accuracy {accuracy:.1%}  {'; '.join(grower.history[-1]['events'])}")
    grower.close()
    for seed in grower.summary():
        print(f"{seed['slot']}: {seed['blueprint']}, {seed['parameters']:,} parameters, {seed['stage'].lower()}")
    return esper.merge(model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    merged = train(load_preset("data/cifar10", resolution=16))
    torch.save(merged.state_dict(), Path("grown.pt"))
