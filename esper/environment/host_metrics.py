"""Loss and accuracy of a host on a split, as sums over batches; nothing is read from the device.

Plain sums: importing torchmetrics would double the time in which a worker process starts.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def batch_sums(output: Tensor, y: Tensor) -> Tensor:
    """Sum of losses, correct predictions and predictions of a batch: [3]."""
    loss = F.cross_entropy(output.flatten(0, -2).float(), y.flatten(), reduction="sum")
    correct = (output.argmax(-1) == y).sum()
    return torch.stack([loss, correct.float(), torch.full_like(loss, y.numel())])


def means(sums: Sequence[Tensor]) -> Tensor:
    """Mean loss and accuracy over batches: [2], from their `batch_sums`."""
    total = torch.stack(list(sums)).sum(0)
    return total[:2] / total[2]
