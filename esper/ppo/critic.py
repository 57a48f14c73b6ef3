"""A critic with a network of its own. It is trained with the policy, but is not needed for acting."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.controllers import EpisodeContext, Moments, RunningStatistics
from esper.controllers.policy import select_keys
from esper.controllers.slot_encoder import SlotEncoder
from esper.lifecycle import Layout
from esper.ppo.distributed import reduce_sum
from esper.ppo.rollout import Rollout

SLOT_WIDTH = 16  # slots are only pooled here, none is chosen
TASK_MIN_STD, TASK_CLIP = 1e-2, 5.0  # normalisation of task descriptors


class Critic(nn.Module):
    """State values from what the policy observes and from descriptors of the task, which the policy does not have.

    Slots pass one encoder, with the descriptor of their seed, and are pooled by mean and maximum. One linear layer and
    one LSTM layer follow: what a policy with memory will do depends on what it has seen, and so does the value. There
    is no attention and no embedding of names: a few hundred episodes determine only a small network.

    Arguments:
        layout: names of the inputs
        task_features: names of the descriptors of a task
        hidden: width of the network
    """

    def __init__(self, layout: Layout, task_features: Sequence[str], *, hidden: int) -> None:
        super().__init__()
        self.sizes: dict[str, Any] = {"hidden": hidden, "task_features": list(task_features)}  # for checkpoints
        self._layout = layout
        self.task_statistics = RunningStatistics(len(task_features))
        self.slot, summary = None, 0
        if layout.slot:
            self.slot = SlotEncoder(len(layout.slot) + len(layout.candidate), SLOT_WIDTH, attention=0)
            summary = self.slot.summary_width
        self.features = nn.Linear(len(layout.base_inputs) + summary + len(task_features), hidden)
        self.norm = nn.LayerNorm(hidden)
        self.memory = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        for parameter in self.head[-1].parameters():
            nn.init.zeros_(parameter)  # the first values are the mean return

    @property
    def flops(self) -> int:
        """FLOPs of the value of one observation: the matrix products of all layers."""
        entries = {name: p.numel() for name, p in self.named_parameters() if p.ndim == 2}
        slots = len(self._layout.slots)
        return 2 * sum(size * (slots if name.startswith("slot.") else 1) for name, size in entries.items())

    def forward(
        self, base: Tensor, slots: Tensor, blueprints: Tensor, context: EpisodeContext, tasks: Tensor
    ) -> Tensor:
        """Values [envs, steps], in units of the return scale.

        The first four arguments are those of `Policy`; `tasks` [envs, task features] are descriptors as they come.
        """
        if self.slot is not None:
            seeds = select_keys(context.candidates, blueprints)
            exists = context.exists.unsqueeze(1).expand(-1, base.shape[1], -1)
            base = torch.cat([base, self.slot(torch.cat([slots, seeds], -1), exists)[1]], -1)
        described = self.task_statistics.normalised(tasks, min_std=TASK_MIN_STD, clip=TASK_CLIP)
        inputs = torch.cat([base, described.unsqueeze(1).expand(-1, base.shape[1], -1)], -1)
        core = self.norm(F.relu(self.features(inputs)))
        values: Tensor = self.head(core + self.memory(core)[0]).squeeze(-1)
        return values

    def values(self, rollout: Rollout, rows: Tensor) -> Tensor:
        """Values [rows, steps] of some episodes."""
        return self(  # type: ignore[no-any-return]
            rollout.base[rows], rollout.slots[rows], rollout.blueprints[rows], rollout.context[rows],
            rollout.task_features[rows],
        )  # fmt: skip

    @torch.no_grad()
    def predict(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Values of a round's observations, and of those after each action: [envs, steps] each."""
        pairs = (
            (rollout.base, rollout.final_base),
            (rollout.slots, rollout.final_slots),
            (rollout.blueprints, rollout.final_blueprints),
        )
        lengths, rows = rollout.valid.sum(1), torch.arange(len(rollout.valid), device=rollout.valid.device)
        sequences = []
        for steps, final in pairs:
            sequence = torch.cat([steps, torch.zeros_like(steps[:, :1])], 1)
            sequence[rows, lengths] = final
            sequences.append(sequence)
        values = self(*sequences, rollout.context, rollout.task_features)
        return values[:, :-1].contiguous(), values[:, 1:].contiguous()

    def fold_tasks(self, rollout: Rollout) -> None:
        """Add a round's task descriptors, of all ranks, to their statistics."""
        every = torch.ones(len(rollout.task_features), dtype=torch.bool, device=rollout.task_features.device)
        self.task_statistics.fold(Moments.unpacked(reduce_sum(Moments.of(rollout.task_features, every).packed())))
