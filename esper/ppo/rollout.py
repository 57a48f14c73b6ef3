"""One round's episodes as tensors [envs, steps, ...], allocated once and written by index."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.controllers import LSTMState, PolicyDecision
from esper.lifecycle import Layout, Masks

PADDING_OPTION = 0  # the one legal option on steps behind an episode's end, so that distributions there are defined


@dataclass
class Rollout:
    """Rows are whole episodes; steps behind an episode's end are not valid.

    Features are kept as they came, for the statistics, and as the network saw them, for the update, whose first
    log-probabilities then are those of the acting policy. Of the memory only the state at the start is kept: an update
    runs the whole sequence again from there.
    """

    layout: Layout
    episode_seeds: list[int]
    raw_base: Tensor  # [envs, steps, features]
    raw_slots: Tensor  # [envs, steps, slots, features]
    base: Tensor
    slots: Tensor
    blueprints: Tensor  # int64 [envs, steps, slots]
    masks: Masks  # [envs, steps, ...]
    action: Tensor  # int64 [envs, steps, heads]
    log_prob: Tensor  # [envs, steps, heads]
    value: Tensor  # [envs, steps], in units of the return scale
    next_value: Tensor  # [envs, steps], of the observation after the action
    reward: Tensor  # [envs, steps]
    terminated: Tensor  # bool [envs, steps]
    truncated: Tensor  # bool [envs, steps]
    valid: Tensor  # bool [envs, steps]
    state: LSTMState  # at the start, [layers, envs, hidden]
    kind: str = "training"  # or sampled, greedy: validation
    outcome: dict[str, Tensor] = field(default_factory=dict)  # [envs], what the episodes came to
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    samples: float = 0.0  # that hosts were trained on

    @classmethod
    def empty(cls, episode_seeds: list[int], steps: int, layout: Layout, state: LSTMState) -> "Rollout":
        """Room for an episode of each seed; `state` is the policy's at the start."""
        device, envs = state[0].device, len(episode_seeds)
        if state[0].shape[1] != envs:
            raise ValueError(f"rollout: the policy's state is of {state[0].shape[1]} episodes, but there are {envs}.")

        def floats(*shape: int) -> Tensor:
            return torch.zeros(envs, steps, *shape, device=device)

        def only_padding(*shape: int) -> Tensor:
            mask = torch.zeros(envs, steps, *shape, dtype=torch.bool, device=device)
            mask[..., PADDING_OPTION] = True
            return mask

        flags = torch.zeros(envs, steps, dtype=torch.bool, device=device)
        slots, ops, heads = len(layout.slots), len(layout.ops), len(layout.head_names)
        others = {
            head: only_padding(len(options)) for head, options in layout.options.items() if head not in ("op", "slot")
        }
        return cls(
            layout=layout,
            episode_seeds=episode_seeds,
            raw_base=floats(layout.base),
            raw_slots=floats(slots, layout.slot),
            base=floats(layout.base),
            slots=floats(slots, layout.slot),
            blueprints=torch.zeros(envs, steps, slots, dtype=torch.int64, device=device),
            masks=Masks(only_padding(ops), only_padding(ops, slots), others),
            action=torch.zeros(envs, steps, heads, dtype=torch.int64, device=device),
            log_prob=floats(heads),
            value=floats(),
            next_value=floats(),
            reward=floats(),
            terminated=flags.clone(),
            truncated=flags.clone(),
            valid=flags,
            state=state,
        )

    def write(self, step: int, choice: PolicyDecision, alive: Tensor) -> None:
        """A decision of the episodes that are `alive` [envs]; what goes on in others is left as padding."""
        if not 0 <= step < self.valid.shape[1]:
            raise ValueError(f"rollout: step {step} is beyond the {self.valid.shape[1]} there is room for.")
        inputs, alive = choice.inputs, alive.to(self.valid.device, non_blocking=True)
        pairs = [
            (self.raw_base, inputs.base),
            (self.raw_slots, inputs.slots),
            (self.blueprints, inputs.blueprints),
            (self.masks.op, inputs.masks.op),
            (self.masks.slot, inputs.masks.slot),
            (self.base, choice.base),
            (self.slots, choice.slots),
            (self.action, choice.action),
            (self.log_prob, choice.log_prob),
            (self.value, choice.value),
        ]
        pairs += [(self.masks.others[head], mask) for head, mask in inputs.masks.others.items()]
        for place, what in pairs:
            rows = alive.view(-1, *[1] * (what.ndim - 1))
            place[:, step] = torch.where(rows, what, place[:, step])
        self.valid[:, step] = alive

    def pay(self, step: int, reward: Tensor, terminated: Tensor, truncated: Tensor) -> None:
        """What came of that decision, [envs] each."""
        alive = self.valid[:, step]
        self.reward[:, step] = torch.where(alive, reward.to(alive.device, non_blocking=True), 0.0)
        self.terminated[:, step] = terminated.to(alive.device, non_blocking=True) & alive
        self.truncated[:, step] = truncated.to(alive.device, non_blocking=True) & alive

    @property
    def decisions(self) -> int:
        return int(self.valid.sum())

    def each(self, head: str) -> Tensor:
        """The options chosen by one head on all steps: int64 [envs, steps]."""
        return self.action[..., self.layout.head_names.index(head)]

    def to(self, device: torch.device) -> "Rollout":
        """Where the policy is; nothing moves where it was made there."""
        if self.valid.device == device:
            return self
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor | Masks)
        }
        state = (self.state[0].to(device), self.state[1].to(device))
        return Rollout(**{**vars(self), **moved, "state": state})
