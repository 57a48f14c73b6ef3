"""Loss and accuracy of a host on a split."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric


class HostMetrics(Metric):
    """Mean loss and accuracy over batches: [2].

    One metric of three sums: MeanMetric and MulticlassAccuracy compute the same, but take more than twice as long.
    Nothing is read from the device. Ranks train different hosts, so nothing is synchronised over them.
    """

    full_state_update = False
    sums: Tensor  # [3]: of losses, correct predictions and predictions

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("sums", torch.zeros(3), dist_reduce_fx="sum")

    def update(self, sums: Tensor) -> None:
        """Add the sums of a batch, from `batch_sums`."""
        self.sums += sums

    def compute(self) -> Tensor:
        return self.sums[:2] / self.sums[2]


def batch_sums(output: Tensor, y: Tensor) -> Tensor:
    """Sum of losses, correct predictions and predictions: [3]; computed once for all metrics of a batch."""
    loss = F.cross_entropy(output.flatten(0, -2).float(), y.flatten(), reduction="sum")
    correct = (output.argmax(-1) == y).sum()
    return torch.stack([loss, correct.float(), torch.full_like(loss, y.numel())])
