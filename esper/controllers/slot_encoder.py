"""Encoders of blueprints and of slots. Slots are a set: their order and missing ones have no effect."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

UNKNOWN = 0  # row of the embedding for a blueprint without a known name


class CandidateEncoder(nn.Module):
    """The encoding of a blueprint in a slot: of its descriptor, and of its name if it is known.

    Arguments:
        columns: width of a descriptor
        names: number of blueprints
        width: of the encoding
    """

    def __init__(self, columns: int, names: int, width: int) -> None:
        super().__init__()
        self.describe = nn.Linear(columns, width)
        self.names = nn.Embedding(names + 1, width)

    def forward(self, candidates: Tensor, named: Tensor) -> Tensor:
        """Encode candidates [envs, slots, blueprints, columns] as [envs, slots, blueprints, width]."""
        rows = torch.arange(1, candidates.shape[2] + 1, device=candidates.device)
        names = self.names(torch.where(named, rows, UNKNOWN))  # [envs, blueprints, width]
        return torch.tanh(self.describe(candidates) + names.unsqueeze(1))


class AllSlotsEncoder(nn.Module):
    """All slots as one more option: the encoding of their average, and a learned change of it.

    It begins without a change, so all slots are then judged like an average slot.

    Arguments:
        width: of the encoding of a slot
        ops: number of ops, each with a bias of its logit for all slots
    """

    def __init__(self, width: int, ops: int) -> None:
        super().__init__()
        self.change = nn.Linear(2 * width, width)
        self.bias = nn.Parameter(torch.zeros(ops))
        nn.init.zeros_(self.change.weight)
        nn.init.zeros_(self.change.bias)

    def forward(self, encoded: Tensor, summary: Tensor, keys: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Append the option to the slots.

        Arguments:
            encoded, summary: [envs, steps, slots, width] and [envs, steps, 2 * width], from SlotEncoder
            keys: encodings of blueprints, [envs, slots, blueprints, embedding]; those of all slots are their mean
            exists: bool [envs, slots]
        """
        mean = summary[..., : encoded.shape[-1]]
        option = mean + self.change(summary)
        mask = exists[..., None, None]
        mean_keys = torch.where(mask, keys, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return torch.cat([encoded, option.unsqueeze(2)], 2), torch.cat([keys, mean_keys], 1)


class SlotEncoder(nn.Module):
    """One encoder for every slot, self-attention between the slots of an environment, and a summary of all of them.

    Arguments:
        inputs: features of a slot
        width: of the encoding
        attention: attention heads; 0 is without attention
    """

    def __init__(self, inputs: int, width: int, attention: int) -> None:
        super().__init__()
        self.encode = nn.Linear(inputs, width)
        self.heads = attention
        self.summary_width = 2 * width
        if attention:
            self.norm = nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width)

    def forward(self, slots: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
        """Encode slots [envs, steps, slots, inputs] with `exists`, bool [envs, steps, slots].

        Returns the encoding of each slot, and its mean and maximum over the slots that exist.
        """
        encoded = F.relu(self.encode(slots))
        if self.heads:
            encoded = encoded + self._attend(encoded, exists)
        mask = exists.unsqueeze(-1)
        total = torch.where(mask, encoded, 0.0).sum(-2)
        mean = total / mask.sum(-2).clamp(min=1)
        largest = torch.where(mask, encoded, -torch.inf).amax(-2)
        largest = torch.where(exists.any(-1, keepdim=True), largest, 0.0)
        return encoded, torch.cat([mean, largest], -1)

    def _attend(self, encoded: Tensor, exists: Tensor) -> Tensor:
        shape = encoded.shape
        qkv = self.qkv(self.norm(encoded)).flatten(0, 1).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [envs * steps, heads, slots, d] each
        visible = (exists | ~exists.any(-1, keepdim=True)).flatten(0, 1)[:, None, None]
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        mixed = torch.where(visible, scores, -torch.inf).softmax(-1) @ v
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2)).view(shape)
        return result
