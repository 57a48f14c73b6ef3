"""Storage for the episodes of one round: tensors [envs, steps, ...], allocated once and written by index."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper.controllers import EpisodeContext, LSTMState, PolicyDecision
from esper.lifecycle import Layout, Masks

PADDING_OPTION = 0  # the only legal option on steps after an episode's end, where distributions must still be defined


@dataclass
class Rollout:
    """Rows are whole episodes; steps after an episode's end are not `valid`.

    Features are stored twice: raw, for the statistics, and normalised as the acting policy saw them, so that the first
    log-probabilities of an update are those of the acting policy. Only the initial LSTM state is stored: an update runs
    the whole sequence again from it.
    """

    layout: Layout
    episode_seeds: list[int]
    context: EpisodeContext
    raw_base: Tensor  # [envs, steps, features]
    raw_slots: Tensor  # [envs, steps, slots, features]
    base: Tensor  # [envs, steps, inputs]
    slots: Tensor
    blueprints: Tensor  # int64 [envs, steps, slots]
    masks: Masks  # [envs, steps, ...]
    action: Tensor  # int64 [envs, steps, heads]
    log_prob: Tensor  # [envs, steps, heads], of the policy
    behaviour: Tensor  # [envs, steps, heads], log-probabilities of the distribution that was sampled
    value: Tensor  # [envs, steps], in units of the return scale
    next_value: Tensor  # [envs, steps], of the observation after the action
    reward: Tensor  # [envs, steps]
    terminated: Tensor  # bool [envs, steps]
    truncated: Tensor  # bool [envs, steps]
    valid: Tensor  # bool [envs, steps]
    tasks: Tensor  # int64 [envs], the same number for episodes of the same task
    task_features: Tensor  # [envs, task features], descriptors of the task that only the critic gets
    final_base: Tensor  # [envs, inputs], normalised, of the observation after the last action
    final_slots: Tensor  # [envs, slots, features]
    final_blueprints: Tensor  # int64 [envs, slots]
    state: LSTMState  # initial, [layers, envs, hidden]
    kind: str = "training"  # or sampled, greedy: validation rounds
    rounds_done: int = 0  # rounds of the run that were done when it was collected
    outcome: dict[str, Tensor] = field(default_factory=dict)  # [envs], final results of the episodes
    seconds: dict[str, float] = field(default_factory=dict)  # by phase
    samples: float = 0.0  # training samples of the hosts

    @classmethod
    def empty(cls, episode_seeds: list[int], steps: int, layout: Layout, state: LSTMState) -> "Rollout":
        """Allocate one row for each episode seed; `state` is the policy's initial state."""
        device, envs = state[0].device, len(episode_seeds)
        if state[0].shape[1] != envs:
            raise ValueError(
                f"rollout: the policy's state is of {state[0].shape[1]} episodes, but episode_seeds has {envs}."
            )

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
        names = len(layout.blueprints)
        return cls(
            layout=layout,
            episode_seeds=episode_seeds,
            context=EpisodeContext(
                exists=torch.ones(envs, slots, dtype=torch.bool, device=device),
                candidates=torch.zeros(envs, slots, names, len(layout.candidate), device=device),
                named=torch.ones(envs, names, dtype=torch.bool, device=device),
            ),
            raw_base=floats(len(layout.base)),
            raw_slots=floats(slots, len(layout.slot)),
            base=floats(len(layout.base_inputs)),
            slots=floats(slots, len(layout.slot)),
            blueprints=torch.zeros(envs, steps, slots, dtype=torch.int64, device=device),
            masks=Masks(only_padding(ops), only_padding(ops, slots + layout.all_slots), others),
            action=torch.zeros(envs, steps, heads, dtype=torch.int64, device=device),
            log_prob=floats(heads),
            behaviour=floats(heads),
            value=floats(),
            next_value=floats(),
            reward=floats(),
            terminated=flags.clone(),
            truncated=flags.clone(),
            valid=flags,
            tasks=torch.zeros(envs, dtype=torch.int64, device=device),
            task_features=torch.zeros(envs, 0, device=device),
            final_base=torch.zeros(envs, len(layout.base_inputs), device=device),
            final_slots=torch.zeros(envs, slots, len(layout.slot), device=device),
            final_blueprints=torch.zeros(envs, slots, dtype=torch.int64, device=device),
            state=state,
        )

    def write_decision(self, step: int, decision: PolicyDecision, alive: Tensor) -> None:
        """Store a decision of the episodes that are `alive`, bool [envs]; other rows stay padding."""
        if not 0 <= step < self.valid.shape[1]:
            raise ValueError(f"rollout: step={step}: must be below {self.valid.shape[1]}, the number of steps.")
        inputs, alive = decision.inputs, alive.to(self.valid.device, non_blocking=True)
        pairs = [
            (self.raw_base, inputs.base),
            (self.raw_slots, inputs.slots),
            (self.blueprints, inputs.blueprints),
            (self.masks.op, inputs.masks.op),
            (self.masks.slot, inputs.masks.slot),
            (self.base, decision.base),
            (self.slots, decision.slots),
            (self.action, decision.action),
            (self.log_prob, decision.log_prob),
            (self.behaviour, decision.behaviour),
            (self.value, decision.value),
        ]
        pairs += [(self.masks.others[head], mask) for head, mask in inputs.masks.others.items()]
        for storage, value in pairs:
            rows = alive.view(-1, *[1] * (value.ndim - 1))
            storage[:, step] = torch.where(rows, value, storage[:, step])
        self.valid[:, step] = alive
        if step == 0:
            self.context = decision.context  # it is the same in all steps

    def write_result(self, step: int, reward: Tensor, terminated: Tensor, truncated: Tensor) -> None:
        """Store the result of that decision, [envs] each; rows that are not valid stay padding."""
        alive = self.valid[:, step]
        self.reward[:, step] = torch.where(alive, reward.to(alive.device, non_blocking=True), 0.0)
        self.terminated[:, step] = terminated.to(alive.device, non_blocking=True) & alive
        self.truncated[:, step] = truncated.to(alive.device, non_blocking=True) & alive

    def write_final(self, decision: PolicyDecision) -> None:
        """Store the observations after the last actions."""
        self.final_base.copy_(decision.base)
        self.final_slots.copy_(decision.slots)
        self.final_blueprints.copy_(decision.inputs.blueprints)

    @property
    def decisions(self) -> int:
        return int(self.valid.sum())

    def select_head(self, head: str) -> Tensor:
        """The options that one head chose: int64 [envs, steps]."""
        return self.action[..., self.layout.head_names.index(head)]

    def to(self, device: torch.device) -> "Rollout":
        """On the given device; nothing is copied if the rollout is there already."""
        if self.valid.device == device:
            return self
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor | Masks | EpisodeContext)
        }
        state = (self.state[0].to(device), self.state[1].to(device))
        return Rollout(**{**vars(self), **moved, "state": state})
