"""The factored LSTM actor-critic: feature network, LSTM, one output network per head, and a critic V(s)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from esper.arguments import LayerCount
from esper.controllers.distribution import FactoredDistribution, Logits
from esper.controllers.statistics import Moments, RunningStatistics
from esper.lifecycle import Layout, Masks
from esper.observation import PolicyInputs

LSTMState = tuple[Tensor, Tensor]  # hidden and cell, each [layers, envs, hidden]
MIN_HEAD_HIDDEN = 32  # hidden units of a head, unless `head_hidden` is set


@dataclass(frozen=True)
class PolicyOutput:
    """The output of the network for sequences [envs, steps]."""

    logits: Logits  # of envs * steps observations
    value: Tensor  # [envs, steps], in units of the return scale
    state: LSTMState  # of the LSTM after the last step


class Policy(nn.Module):
    """The network: action logits, state values, and the statistics that normalise its inputs.

    Arguments:
        layout: sizes of the inputs, heads and their options
        hidden: width of the feature network and of the LSTM
        depth: layers of the feature network; all but the first are residual
        layers: layers of the LSTM, whose output is added to the features; 0 is a policy without memory
        head_hidden: hidden units of each head; None is half of `hidden`, at least 32
        embedding: width of a blueprint's embedding
        slot_width: width of the features of a slot
        gains: gains of the orthogonal initialisation of hidden layers, policy outputs and value output
        forget_bias: initial bias of the LSTM's forget gates; above 0, the LSTM remembers from the start
        floors: minimum probability of a legal option, by head; None is none
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
        gains: Mapping[str, float],
        forget_bias: float,
        floors: Mapping[str, float] | None,
        validate: bool,
        momentum: float | None,
        min_std: float,
        clip: float,
        compile: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None,
        masked: bool = True,  # the default is for checkpoints that do not have this setting
    ) -> None:
        super().__init__()
        min_sizes = {"hidden": 1, "depth": 1, "layers": 0, "embedding": 1, "slot_width": 1, "head_hidden": 1}
        inner = max(MIN_HEAD_HIDDEN, hidden // 2) if head_hidden is None else head_hidden
        sizes = (hidden, depth, layers, embedding, slot_width, inner)
        self.sizes = dict(zip(min_sizes, sizes, strict=True))  # for checkpoints
        for key, value in self.sizes.items():
            if value < min_sizes[key]:
                raise ValueError(f"policy.{key}={value}: must be at least {min_sizes[key]}.")
        floors = floors or {}
        unknown = set(floors) - set(layout.head_names)
        if unknown or not all(0 <= floor < 1 for floor in floors.values()):
            raise ValueError(
                f"policy.floors={dict(floors)}: must be in [0, 1) by head, of {', '.join(layout.head_names)}."
            )
        self.layout = layout
        self.masked = masked
        self._validate, self._floors, self._min_std, self._clip = validate, dict(floors), min_std, clip
        ops, slots = len(layout.ops), len(layout.slots)
        self.base_statistics = RunningStatistics(layout.base, momentum)
        self.slot_statistics = RunningStatistics(layout.slot, momentum)
        self.blueprint = nn.Embedding(len(layout.blueprints) + 1, embedding)
        self.slot = nn.Linear(layout.slot + embedding + slots, slot_width)
        self.features = nn.ModuleList([nn.Linear(layout.base + slots * slot_width, hidden)])
        self.features.extend(nn.Linear(hidden, hidden) for _ in range(depth - 1))
        self.norm = nn.LayerNorm(hidden)  # the only norm: it prevents saturation of the LSTM's gates
        self.memory = nn.LSTM(hidden, hidden, layers, batch_first=True) if layers else None
        inputs = {"op": hidden, "slot": hidden + slot_width}
        outputs = {"slot": ops}  # one logit per op for each slot
        self.heads = nn.ModuleDict(
            {
                head: _mlp(
                    inputs.get(head, hidden + slot_width + len(layout.users[head])),
                    inner,
                    outputs.get(head, len(options)),
                )
                for head, options in layout.options.items()
            }
        )
        self.critic = _mlp(hidden, inner, 1)
        self._initialise(gains, forget_bias)
        self.compile_mode = compile
        if compile is not None:
            self.compile(mode=None if compile == "default" else compile, dynamic=True, fullgraph=False)

    @property
    def flops(self) -> int:
        """FLOPs of one decision: the matrix products of the linear layers and of the LSTM."""
        slots = len(self.layout.slots)
        passes = {"slot": slots} | {
            head: slots * len(users) for head, users in self.layout.users.items() if head not in ("op", "slot")
        }  # of heads that run more than once for a decision
        single = [self.features, self.critic, *(head for name, head in self.heads.items() if name not in passes)]
        total = sum(_count_weights(part) for part in single) + slots * _count_weights(self.slot)
        total += sum(count * _count_weights(self.heads[name]) for name, count in passes.items() if name in self.heads)
        return 2 * (total + (0 if self.memory is None else _count_weights(self.memory)))

    def begin(self, envs: int) -> LSTMState:
        """The LSTM state at the start of an episode."""
        zeros = torch.zeros(self.sizes["layers"], envs, self.sizes["hidden"], device=self.norm.weight.device)
        return zeros, zeros.clone()

    def forward(self, base: Tensor, slots: Tensor, blueprints: Tensor, state: LSTMState) -> PolicyOutput:
        """Run sequences: base [envs, steps, features], slots [envs, steps, slots, features], both normalised."""
        slot_ids = torch.eye(len(self.layout.slots), device=base.device).expand(*blueprints.shape, -1)
        slot_features = F.relu(self.slot(torch.cat([slots, self.blueprint(blueprints), slot_ids], -1)))
        features = torch.cat([base, slot_features.flatten(-2)], -1)
        features = F.relu(self.features[0](features))
        for layer in self.features[1:]:
            features = features + F.relu(layer(features))
        core = self.norm(features)
        if self.memory is not None:
            memory, state = self.memory(core, state)
            core = core + memory
        value = self.critic(core).squeeze(-1)
        return PolicyOutput(self._logits(core.flatten(0, 1), slot_features.flatten(0, 1)), value, state)

    def _logits(self, core: Tensor, slot_features: Tensor) -> Logits:
        """From core [B, hidden] and slot_features [B, slots, slot_width]."""
        slots = slot_features.shape[1]
        per_slot = torch.cat([core.unsqueeze(1).expand(-1, slots, -1), slot_features], -1)
        others = {}
        for head in self.layout.head_names:
            if head not in ("op", "slot"):
                users = len(self.layout.users[head])
                op = torch.eye(users, device=core.device)[None, :, None].expand(len(core), -1, slots, -1)
                others[head] = self.heads[head](torch.cat([per_slot.unsqueeze(1).expand(-1, users, -1, -1), op], -1))
        if "slot" in self.layout.options:
            slot = self.heads["slot"](per_slot).transpose(1, 2)
        else:
            slot = core.new_zeros(len(core), len(self.layout.ops), slots)
        return Logits(self.heads["op"](core), slot, others)

    def distribution(self, logits: Logits, masks: Masks, validate: bool | None = None) -> FactoredDistribution:
        """The distribution over actions; `validate` overrides the policy's own setting."""
        check = self._validate if validate is None else validate
        return FactoredDistribution(logits, masks, self.layout, self._floors, check, self.masked)

    def normalised(self, inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
        """Normalised base and slot features, the inputs of `forward`."""
        scale = {"min_std": self._min_std, "clip": self._clip}
        base = self.base_statistics.normalised(inputs.base, **scale)
        return base, self.slot_statistics.normalised(inputs.slots, **scale)

    def moments(self, base: Tensor, slots: Tensor, valid: Tensor) -> Tensor:
        """Moments of raw features [envs, steps, ...], packed for `fold`; they can be summed over ranks."""
        valid_by_slot = valid.unsqueeze(-1).expand(slots.shape[:-1])
        return torch.cat([Moments.of(base, valid).packed(), Moments.of(slots, valid_by_slot).packed()])

    def fold(self, packed: Tensor) -> None:
        """Add packed moments to the statistics."""
        split = 1 + 2 * self.layout.base
        self.base_statistics.fold(Moments.unpacked(packed[:split]))
        self.slot_statistics.fold(Moments.unpacked(packed[split:]))

    def _initialise(self, gains: Mapping[str, float], forget_bias: float) -> None:
        for module in (self.slot, *self.features):
            _orthogonal(module, gains["hidden"])
        for head in (*self.heads.values(), self.critic):
            inner, _, outer = head.children()
            _orthogonal(inner, gains["hidden"])
            _orthogonal(outer, gains["value"] if head is self.critic else gains["policy"])
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


def _count_weights(module: nn.Module) -> int:
    """Number of matrix entries; a forward pass multiplies and adds each once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim == 2)


def _mlp(width: int, inner: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, outputs))


def _orthogonal(layer: nn.Module, gain: float) -> None:
    assert isinstance(layer, nn.Linear)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)


def noise_width(layout: Layout) -> int:
    """Number of random draws for one action."""
    return sum(len(options) for options in layout.options.values())
