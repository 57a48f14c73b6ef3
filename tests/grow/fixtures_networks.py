"""Small networks that know nothing of esper, and loops that train them."""

from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.grow.grower import Grower


class Block(nn.Module):
    """A residual block with everything that must not be disturbed: BatchNorm, dropout and in-place ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.conv(x)))


class ResNet(nn.Module):
    """Three stages, named as in torchvision."""

    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.layer1 = nn.Sequential(Block(width, width), Block(width, width))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width))
        self.layer3 = Block(2 * width, 2 * width, 2)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.layer1(self.stem(x)))
        return self.head(self.act(self.layer3(self.act(self.layer2(x)))).mean((2, 3)))


@dataclass
class Output:
    """What a language model of Hugging Face returns, nearly."""

    last_hidden_state: Tensor
    hidden: tuple[Tensor, ...] | None = None


Pair = namedtuple("Pair", ["features", "extra"])


class TextBlock(nn.Module):
    """Returns a tensor, a tuple, a named tuple or a dataclass."""

    def __init__(self, channels: int, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(channels, channels), kind

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> object:
        x = x + scale * F.gelu(self.layer(x))
        x = x if mask is None else x * mask
        return {"tensor": x, "tuple": (x, None), "named": Pair(x, 1), "dataclass": Output(x)}[self.kind]


class TextNet(nn.Module):
    """A stack of blocks over token embeddings."""

    def __init__(self, kind: str = "tensor", channels: int = 8, tokens: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, channels)
        self.h = nn.ModuleList(TextBlock(channels, kind) for _ in range(3))
        self.head = nn.Linear(channels, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.h:
            out = block(x, scale=0.5)
            x = out if isinstance(out, Tensor) else out.last_hidden_state if isinstance(out, Output) else out[0]
        return self.head(x)


def images(batch: int = 8, size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images and their classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, size, size, generator=generator)
    return x, torch.randint(4, (batch,), generator=generator)


def tokens(batch: int = 4, time: int = 6) -> Tensor:
    return torch.randint(11, (batch, time), generator=torch.Generator().manual_seed(0))


def train_batches(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, batches: int = 3, schedule: object = None
) -> float:
    """Train on a few batches that follow from `step`; the mean loss."""
    model.train()
    torch.manual_seed(step)
    total = 0.0
    for index in range(batches):
        x, y = images(seed=100 * step + index)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    if schedule is not None:
        schedule.step()  # type: ignore[attr-defined]
    return total / batches


@torch.no_grad()
def validate(model: nn.Module) -> tuple[float, float]:
    """Loss and accuracy on a fixed batch."""
    model.eval()
    x, y = images(32, seed=7)
    out = model(x)
    return F.cross_entropy(out, y).item(), (out.argmax(-1) == y).float().mean().item()


def run_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    grower: Grower,
    steps: range,
    schedule: object = None,
    evaluate: bool = True,
) -> None:
    """A plain training loop."""
    for step in steps:
        train_loss = train_batches(model, optimizer, step, schedule=schedule)
        loss, score = validate(model)
        probe = (lambda: validate(model)) if evaluate else None
        grower.step(train_loss=train_loss, val_loss=loss, score=score, evaluate=probe)
