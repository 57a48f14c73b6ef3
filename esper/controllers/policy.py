"""The factored LSTM actor-critic for any number of slots and any list of blueprints.

Every slot passes the same encoder, slots exchange information as a set, and a slot is chosen by a pointer. A blueprint
is chosen by how well its descriptor in that slot matches the state. No weight belongs to the index of a slot. Where all
slots may be chosen at once, that is one more slot, with the encoding of all of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from esper.arguments import LayerCount
from esper.controllers.distribution import FactoredDistribution, Logits
from esper.controllers.slot_encoder import AllSlotsEncoder, CandidateEncoder, SlotEncoder
from esper.controllers.statistics import Moments, RunningStatistics
from esper.lifecycle import HEAD_NAMES, Layout, Masks
from esper.observation import PolicyInputs

LSTMState = tuple[Tensor, Tensor]  # hidden and cell, each [layers, envs, hidden]
MIN_HEAD_HIDDEN = 32  # hidden units of a head, unless `head_hidden` is set


@dataclass(frozen=True)
class EpisodeContext:
    """What a policy knows of whole episodes."""

    exists: Tensor  # bool [envs, slots]
    candidates: Tensor  # [envs, slots, blueprints, columns]
    named: Tensor  # bool [envs, blueprints], whether the policy sees the name of a blueprint

    def __getitem__(self, rows: Tensor) -> "EpisodeContext":
        """The context of some episodes."""
        return EpisodeContext(*(getattr(self, each.name)[rows] for each in fields(self)))

    def to(self, device: torch.device) -> "EpisodeContext":
        return EpisodeContext(*(getattr(self, each.name).to(device) for each in fields(self)))


@dataclass(frozen=True)
class PolicyOutput:
    """The output of the network for sequences [envs, steps]."""

    logits: Logits  # of envs * steps observations
    value: Tensor  # [envs, steps], in units of the return scale; NaN without a critic
    state: LSTMState  # of the LSTM after the last step


class Policy(nn.Module):
    """The network: action logits, state values, and the statistics that normalise its inputs.

    Arguments:
        layout: names of the inputs, heads and their options
        hidden: width of the feature network and of the LSTM
        depth: layers of the feature network; all but the first are residual
        layers: layers of the LSTM, whose output is added to the features; 0 is a policy without memory
        head_hidden: hidden units of each head; None is half of `hidden`, at least 32
        embedding: width of the encoding of a blueprint
        slot_width: width of the encoding of a slot
        attention: attention heads between slots; 0 is none, slots are then pooled only
        group_dropout: share of training episodes in which each optional group of features is missing
        name_dropout: share of training episodes in which the name of each blueprint is unknown
        gains: gains of the orthogonal initialisation of hidden layers, policy outputs and value output
        forget_bias: initial bias of the LSTM's forget gates; above 0, the LSTM remembers from the start
        floors: minimum probability of a legal option while training episodes are collected, by head, also of heads that
            the layout lacks; None is none
        validate: check masks and logits for every distribution
        momentum: weight of the newest moments in the observation statistics; None weighs every sample equally
        min_std: minimum standard deviation that features are divided by
        clip: normalised features are clipped to [-clip, clip]
        compile: mode of torch.compile, with dynamic shapes and graph breaks allowed; None does not compile
        masked: whether heads that an op does not use are left out of the action; False is an ablation
    """

    def __init__(
        self,
        layout: Layout,
        *,
        hidden: int,
        depth: LayerCount,
        layers: Annotated[int, Ge(0), Le(1000)],
        head_hidden: int | None,
        embedding: int,
        slot_width: int,
        attention: Annotated[int, Ge(0), Le(64)],
        group_dropout: Annotated[float, Ge(0), Le(1)],
        name_dropout: Annotated[float, Ge(0), Le(1)],
        gains: Mapping[str, float],
        forget_bias: float,
        floors: Mapping[str, float] | None,
        validate: bool,
        momentum: float | None,
        min_std: float,
        clip: float,
        compile: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None,
        masked: bool,
    ) -> None:
        super().__init__()
        inner = max(MIN_HEAD_HIDDEN, hidden // 2) if head_hidden is None else head_hidden
        self.sizes = {
            "hidden": hidden,
            "depth": depth,
            "layers": layers,
            "embedding": embedding,
            "slot_width": slot_width,
            "head_hidden": inner,
            "attention": attention,
        }  # for checkpoints
        self.layout, self.masked = layout, masked
        self.group_dropout, self.name_dropout = group_dropout, name_dropout
        self._check(floors or {})
        self._validate, self._floors, self._min_std, self._clip = validate, dict(floors or {}), min_std, clip
        self.base_statistics = RunningStatistics(len(layout.base), momentum)
        self.slot_statistics = RunningStatistics(len(layout.slot), momentum)
        self.candidates, self.slot = None, None
        if layout.slot:  # other environments have features of slots no more than blueprints
            self.candidates = CandidateEncoder(len(layout.candidate), len(layout.blueprints), embedding)
            self.slot = SlotEncoder(len(layout.slot) + embedding, slot_width, attention)
        self.all_slots = AllSlotsEncoder(slot_width, len(layout.ops)) if layout.all_slots else None
        summary = 0 if self.slot is None else self.slot.summary_width
        self.features = nn.ModuleList([nn.Linear(len(layout.base_inputs) + summary, hidden)])
        self.features.extend(nn.Linear(hidden, hidden) for _ in range(depth - 1))
        self.norm = nn.LayerNorm(hidden)  # the only norm: it prevents saturation of the LSTM's gates
        self.memory = nn.LSTM(hidden, hidden, layers, batch_first=True) if layers else None
        self.heads = nn.ModuleDict({head: self._make_head(head, inner) for head in layout.head_names})
        self.critic: nn.Sequential | None = _mlp(hidden, inner, 1)  # None with a separate critic
        self._initialise(gains, forget_bias)
        self.known: dict[str, Tensor] = {}  # bool [options] by head, of options that the policy may choose
        self.compile_mode = compile
        if compile is not None:
            self.compile(mode=None if compile == "default" else compile, dynamic=True, fullgraph=False)

    def _check(self, floors: Mapping[str, float]) -> None:
        for key, value in self.sizes.items():
            least = 0 if key in ("layers", "attention") else 1
            if value < least:
                raise ValueError(f"policy.{key}={value}: must be at least {least}.")
        width, attention = self.sizes["slot_width"], self.sizes["attention"]
        if attention and width % attention:
            raise ValueError(f"policy.attention={attention}: must divide policy.slot_width={width}.")
        if set(floors) - set(HEAD_NAMES) or not all(0 <= floor < 1 for floor in floors.values()):
            raise ValueError(f"policy.floors={dict(floors)}: must be in [0, 1) by head, of {', '.join(HEAD_NAMES)}.")

    def _make_head(self, head: str, inner: int) -> nn.Module:
        """The output network of one head: of the core, for all but op also of a slot, and of the op."""
        layout, hidden = self.layout, self.sizes["hidden"]
        inputs = hidden if head == "op" else hidden + self.sizes["slot_width"]
        if head == "blueprint":
            return _mlp(inputs, inner, self.sizes["embedding"])  # a query that is compared with candidates
        if head == "slot":
            return _mlp(inputs, inner, len(layout.ops))  # one logit per op for each slot
        return _mlp(inputs if head == "op" else inputs + len(layout.users[head]), inner, len(layout.options[head]))

    @property
    def flops(self) -> int:
        """FLOPs of one decision: the matrix products of the linear layers, of the LSTM and of attention."""
        slots, names = len(self.layout.slots), len(self.layout.blueprints)
        options = slots + self.layout.all_slots
        passes = {head: options * len(self.layout.users[head]) for head in self.layout.head_names}
        passes |= {"op": 1, "slot": options}
        total = _count_weights(self.features) + (0 if self.critic is None else _count_weights(self.critic))
        if self.slot is not None and self.candidates is not None:
            total += slots * _count_weights(self.slot)
            total += 2 * slots * slots * self.sizes["slot_width"] * bool(self.sizes["attention"])
            total += slots * names * _count_weights(self.candidates.describe)
            total += options * names * self.sizes["embedding"]
        if self.all_slots is not None:
            total += _count_weights(self.all_slots)
        total += sum(passes[name] * _count_weights(head) for name, head in self.heads.items())
        return 2 * (total + (0 if self.memory is None else _count_weights(self.memory)))

    def begin(self, envs: int) -> LSTMState:
        """The LSTM state at the start of an episode."""
        zeros = torch.zeros(self.sizes["layers"], envs, self.sizes["hidden"], device=self.norm.weight.device)
        return zeros, zeros.clone()

    def forward(
        self, base: Tensor, slots: Tensor, blueprints: Tensor, state: LSTMState, context: EpisodeContext
    ) -> PolicyOutput:
        """Run sequences.

        Arguments:
            base: [envs, steps, inputs], from `normalised`
            slots: [envs, steps, slots, features], from `normalised`
            blueprints: int64 [envs, steps, slots], 0 without a seed
            state: of the LSTM before the first step
            context: of the episodes
        """
        keys, encoded = None, slots
        if self.slot is not None and self.candidates is not None:
            keys = self.candidates(context.candidates, context.named)  # [envs, slots, blueprints, embedding]
            exists = context.exists.unsqueeze(1).expand(-1, base.shape[1], -1)
            encoded, summary = self.slot(torch.cat([slots, select_keys(keys, blueprints)], -1), exists)
            base = torch.cat([base, summary], -1)
            if self.all_slots is not None:
                encoded, keys = self.all_slots(encoded, summary, keys, context.exists)
        features = F.relu(self.features[0](base))
        for layer in self.features[1:]:
            features = features + F.relu(layer(features))
        core = self.norm(features)
        if self.memory is not None:
            memory, state = self.memory(core, state)
            core = core + memory
        value = core.new_full(core.shape[:2], torch.nan) if self.critic is None else self.critic(core).squeeze(-1)
        return PolicyOutput(self._logits(core, encoded, keys), value, state)

    def _logits(self, core: Tensor, encoded: Tensor, keys: Tensor | None) -> Logits:
        """From core [envs, steps, hidden], slots [envs, steps, slots, slot_width] and keys of blueprints.

        Where all slots may be chosen at once, they are the last slot.
        """
        slots = encoded.shape[2]
        per_slot = torch.cat([core.unsqueeze(2).expand(-1, -1, slots, -1), encoded], -1)
        others = {}
        for head in self.layout.head_names:
            if head == "blueprint":
                assert keys is not None
                query = self.heads[head](per_slot)  # [envs, steps, slots, embedding]
                match = torch.einsum("etsd,eskd->etsk", query, keys) / math.sqrt(keys.shape[-1])
                others[head] = match.flatten(0, 1).unsqueeze(1).expand(-1, len(self.layout.users[head]), -1, -1)
            elif head not in ("op", "slot"):
                users = len(self.layout.users[head])
                rows = per_slot.flatten(0, 1).unsqueeze(1).expand(-1, users, -1, -1)
                op = torch.eye(users, device=core.device)[None, :, None].expand(*rows.shape[:3], -1)
                others[head] = self.heads[head](torch.cat([rows, op], -1))
        core, per_slot = core.flatten(0, 1), per_slot.flatten(0, 1)
        if "slot" in self.layout.options:
            slot = self.heads["slot"](per_slot).transpose(1, 2)
        else:
            slot = core.new_zeros(len(core), len(self.layout.ops), slots)
        if self.all_slots is not None:
            slot = slot + F.pad(self.all_slots.bias.unsqueeze(1), (slots - 1, 0))
        return Logits(self.heads["op"](core), slot, others)

    def distribution(
        self, logits: Logits, masks: Masks, validate: bool | None = None, explore: bool = False
    ) -> FactoredDistribution:
        """The distribution over actions.

        Arguments:
            logits, masks: of B observations
            validate: overrides the policy's own setting
            explore: whether to mix in the floors, as in training episodes
        """
        check = self._validate if validate is None else validate
        floors = self._floors if explore else {}
        return FactoredDistribution(logits, self._known_masks(masks), self.layout, floors, check, self.masked)

    def _known_masks(self, masks: Masks) -> Masks:
        """The masks without options that the policy was not trained with."""
        if not self.known:
            return masks
        known = {head: mask.to(masks.op.device) for head, mask in self.known.items()}

        def restrict(head: str, mask: Tensor) -> Tensor:
            return mask & known[head] if head in known else mask

        others = {head: restrict(head, mask) for head, mask in masks.others.items()}
        return Masks(restrict("op", masks.op), restrict("slot", masks.slot), others)

    def normalised(self, inputs: PolicyInputs, available: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of `forward`; `available`, bool [envs, groups], is whether a group of features is known."""
        scale = {"min_std": self._min_std, "clip": self._clip}
        base = self.base_statistics.normalised(inputs.base, **scale)
        slots = self.slot_statistics.normalised(inputs.slots, **scale)
        of_base, of_slot = self.layout.group_columns(base.device)
        missing = ~available.unsqueeze(-1)
        base = base * ~(missing & of_base).any(1)
        slots = slots * ~(missing & of_slot).any(1).unsqueeze(1)
        return torch.cat([base, available.float()], -1), slots

    def moments(self, base: Tensor, slots: Tensor, valid: Tensor, exists: Tensor) -> Tensor:
        """Moments of raw features [envs, steps, ...], packed for `fold`; they can be summed over ranks."""
        valid_by_slot = valid.unsqueeze(-1) & exists.unsqueeze(1)
        return torch.cat([Moments.of(base, valid).packed(), Moments.of(slots, valid_by_slot).packed()])

    def fold(self, packed: Tensor) -> None:
        """Add packed moments to the statistics."""
        split = 1 + 2 * len(self.layout.base)
        self.base_statistics.fold(Moments.unpacked(packed[:split]))
        self.slot_statistics.fold(Moments.unpacked(packed[split:]))

    def _initialise(self, gains: Mapping[str, float], forget_bias: float) -> None:
        for module in (*([] if self.slot is None else [self.slot.encode]), *self.features):
            _orthogonal(module, gains["hidden"])
        assert self.critic is not None
        for name, head in (*self.heads.items(), ("critic", self.critic)):
            inner, _, outer = head.children()
            _orthogonal(inner, gains["hidden"])
            _orthogonal(outer, gains["value"] if name == "critic" else gains["policy"])
        if self.memory is None:
            return
        for name, weight in self.memory.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(weight)
            else:
                nn.init.zeros_(weight)
            if name.startswith("bias_ih"):
                quarter = (
                    len(weight) // 4
                )  # gate order: input, forget, cell, output; bias_hh, which adds to it, stays 0
                nn.init.constant_(weight[quarter : 2 * quarter], forget_bias)


def select_keys(keys: Tensor, blueprints: Tensor) -> Tensor:
    """The key of the seed in each slot, [envs, steps, slots, embedding]; zeros without a seed."""
    none = keys.new_zeros(*keys.shape[:2], 1, keys.shape[3])
    index = blueprints.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, keys.shape[3])
    return torch.cat([none, keys], 2).gather(2, index).transpose(1, 2)


def _count_weights(module: nn.Module) -> int:
    """Number of matrix entries; a forward pass multiplies and adds each once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim == 2)


def _mlp(width: int, inner: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, outputs))


def _orthogonal(layer: nn.Module, gain: float) -> None:
    assert isinstance(layer, nn.Linear)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
