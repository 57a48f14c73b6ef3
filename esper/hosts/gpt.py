"""A small GPT: pre-norm blocks, learned positions, and an output layer tied to the token embedding."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.arguments import LayerCount
from esper.flops import Flops, attention_flops, linear_flops
from esper.hosts.host import Dropout, Host, Slot, require_positive, round_half_up

INIT_STD = 0.02  # GPT-2's
SEED_HEADS = 4  # heads of the blueprint attention, which must divide the channels


class TokenEmbedding(nn.Module):
    """Tokens [batch, time] -> features [batch, time, channels]."""

    def __init__(self, vocabulary: int, channels: int, block_size: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, channels)
        self.positions = nn.Embedding(block_size, channels)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        time, block_size = tokens.shape[1], self.positions.num_embeddings
        if time > block_size:
            raise ValueError(f"host.block_size={block_size}: must be at least the {time} tokens of the text.")
        out: Tensor = self.dropout(self.tokens(tokens) + self.positions.weight[:time])
        return out


class SelfAttention(nn.Module):
    """Causal self-attention, without dropout on its weights: the fused kernel takes no generator."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels)
        self.project = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, time, channels / heads]
        out: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return out


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), left out if there are no heads, then x + mlp(norm(x)), left out without `mlp`."""

    def __init__(self, channels: int, heads: int, dropout: float, *, mlp: bool, norm: bool) -> None:
        super().__init__()
        if heads:
            self.norm1 = _norm(channels, norm)
            self.attention = SelfAttention(channels, heads)
        self.heads = heads
        self.mlp = mlp
        if mlp:
            self.norm2 = _norm(channels, norm)
            self.expand = nn.Linear(channels, 4 * channels)
            self.contract = nn.Linear(4 * channels, channels)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.heads:
            x = x + self.dropout(self.attention(self.norm1(x)))
        if self.mlp:
            x = x + self.dropout(self.contract(F.gelu(self.expand(self.norm2(x)))))
        return x

    def branch_ends(self) -> list[nn.Linear]:
        """The last layer of each branch, which adds to the residual stream."""
        return [*([self.attention.project] if self.heads else []), *([self.contract] if self.mlp else [])]


def _norm(channels: int, norm: bool) -> nn.Module:
    return nn.LayerNorm(channels) if norm else nn.Identity()


class GPTHost(Host):
    """Transformer blocks in segments of equal length, with a slot (segment1, ...) after each segment.

    Arguments:
        vocabulary: number of tokens
        channels: width of the features
        heads: attention heads; must divide channels; 0 leaves attention out, so each position uses only its own token
        layers: number of transformer blocks; segments must divide it
        segments: number of segments, and of slots; None is one for each layer
        block_size: maximum context length, in tokens
        dropout: probability, on the embedding and on the branches of each block
        mlp: whether blocks have an MLP; a host without one needs heads
        norm: whether there is LayerNorm, in front of each branch and of the output layer
    """

    topology: ClassVar[str] = "transformer"

    def __init__(
        self,
        *,
        vocabulary: int,
        channels: int,
        heads: int,
        layers: LayerCount,
        segments: int | None,
        block_size: int,
        dropout: float,
        mlp: bool = True,
        norm: bool = True,
    ) -> None:
        if segments is None:
            segments = layers
        require_positive(
            vocabulary=vocabulary,
            channels=channels,
            layers=layers,
            segments=segments,
            block_size=block_size,
        )
        if heads < 0 or (heads and channels % heads):
            raise ValueError(f"host.heads={heads}: must divide host.channels={channels}, or be 0 for no attention.")
        if not (heads or mlp):
            raise ValueError("host.mlp=false: must be true with host.heads=0, because blocks would have no layers.")
        if layers % segments:
            raise ValueError(f"host.segments={segments}: must divide host.layers={layers}.")
        embedding = TokenEmbedding(vocabulary, channels, block_size, dropout)
        head = nn.Linear(channels, vocabulary, bias=False)
        per_segment = layers // segments
        stack = [TransformerBlock(channels, heads, dropout, mlp=mlp, norm=norm) for _ in range(layers)]
        pieces = [nn.Sequential(*stack[index : index + per_segment]) for index in range(0, layers, per_segment)]
        super().__init__(
            [nn.Sequential(embedding, *pieces[0]), *pieces[1:], nn.Sequential(_norm(channels, norm), head)],
            [Slot(f"segment{index + 1}", channels) for index in range(segments)],
        )
        self.block_size = block_size
        self._vocabulary, self._channels, self._heads, self._layers = vocabulary, channels, heads, per_segment
        self._has_mlp = mlp
        self._initialise(layers)
        head.weight = embedding.tokens.weight

    @classmethod
    def variant_arguments(cls, arguments: Mapping[str, Any], *, width: float, depth: int) -> dict[str, Any]:
        """Channels times `width`, rounded so that heads divide them, and `depth` further layers in each segment."""
        channels = arguments["channels"]
        unit = math.lcm(max(1, arguments["heads"]), math.gcd(channels, SEED_HEADS))
        segments = arguments["segments"] or arguments["layers"]
        return {
            **arguments,
            "channels": unit * round_half_up(channels * width / unit),
            "layers": arguments["layers"] + depth * segments,
            "segments": segments,
        }

    def flops(self, shape: Sequence[int]) -> list[Flops]:
        """FLOPs of each segment; `shape` is that of a text: [time]."""
        (time,) = shape
        c = self._channels
        attention = (
            linear_flops(c, 3 * c, time) + attention_flops(c, time) + linear_flops(c, c, time)
            if self._heads
            else Flops()
        )
        mlp = linear_flops(c, 4 * c, time) + linear_flops(4 * c, c, time) if self._has_mlp else Flops()
        segment = sum([attention + mlp] * self._layers, Flops())
        return [segment] * len(self.slots) + [linear_flops(c, self._vocabulary, time)]

    def _initialise(self, layers: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, TransformerBlock):  # blocks add to the residual stream: keep its initial variance
                ends = module.branch_ends()
                for end in ends:
                    with torch.no_grad():
                        end.weight /= math.sqrt(len(ends) * layers)
