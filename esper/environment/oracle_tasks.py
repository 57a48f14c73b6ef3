"""The tasks of the many-task oracle: how they are drawn, and the formula of their scores.

A task has a host that lacks one kind of seed, or nothing. Blueprints of that kind add points, others do not. Every seed
costs: training is measured in FLOPs, so a network that is twice as expensive trains for half as many batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper.blueprints import blueprint
from esper.environment.formula import CHANCE_SCORE
from esper.rng import make_generator

TOPOLOGY = "cnn"
SLOT_CHANNELS = 16  # at every slot; the sizes of blueprints follow from it
REFERENCE = "conv_small"  # the blueprint whose cost is drawn; that of others is in proportion to their parameters
SPLITS = {  # task numbers
    "train": range(0, 64),
    "validation": range(64, 128),
    "test": range(128, 192),
    "heldout": range(192, 256),  # other numbers of slots and other costs
}
TASKS = sum(len(numbers) for numbers in SPLITS.values())
LACKS = (  # what a host lacks, by task number: a quarter lacks nothing
    None, "spatial", "normalising", "gating", None, "spatial", "normalising", "channel_mixing",
)  # fmt: skip
SLOT_RANGE, HELD_OUT_SLOT_RANGE = (1, 5), (6, 8)
COST_RANGE, HELD_OUT_COST_RANGE = (0.1, 0.4), (0.4, 0.8)  # of REFERENCE in all slots, relative to the host
GAIN_RANGE = (10.0, 24.0)  # points of what the host lacks, over all slots
MATCH_RANGE = (0.6, 1.0)  # share of these points that a blueprint of the kind that the host lacks adds
OTHER_RANGE = (-0.1, 0.1)  # and one of another kind; if the host lacks nothing, every blueprint takes points away
BEND = 2.0  # ln of the largest factor between the gains of slots at depth 1 and 1/2
LEVEL_RANGE = (45.0, 65.0)  # points that a host which lacks nothing reaches with an infinite budget
HINT = 0.3  # share of the gain that is missing in the host's own level
PACE_RANGE = (0.2, 0.8)  # share of the budget after which a host has 63% of its level; small for a large budget
DELAY_RANGE = (0.05, 0.3)  # share of the budget after which a seed has 63% of its gain, if nothing else is trained
NOISE_RANGE = (0.3, 1.0)  # standard deviation of a score, points


@dataclass(frozen=True)
class OracleTasks:
    """Some tasks; a row of each field is a task."""

    exists: Tensor  # bool [tasks, slots], whether the host has the slot
    gain: Tensor  # [tasks, slots, blueprints], points that a fully trained seed adds
    cost: Tensor  # [tasks, slots, blueprints], FLOPs and parameters of a seed relative to the host
    level: Tensor  # [tasks], points that the host reaches with an infinite budget
    pace: Tensor  # [tasks], share of the budget after which the host has 63% of it
    delay: Tensor  # [tasks], share of the budget, spent on the host alone, after which a seed has 63% of its gain
    noise: Tensor  # [tasks], standard deviation of a score

    def __len__(self) -> int:
        return len(self.level)

    def __getitem__(self, rows: Tensor) -> "OracleTasks":
        return OracleTasks(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def of_seeds(self, table: Tensor, blueprints: Tensor) -> Tensor:
        """The entries of `gain` or `cost` for seeds, int64 [tasks, slots]; 0 where it is -1, no seed."""
        chosen = table.gather(2, blueprints.clamp(min=0).unsqueeze(2)).squeeze(2)
        return torch.where(blueprints >= 0, chosen, 0.0)

    def host_score(self, host_training: Tensor) -> Tensor:
        """Points of the host alone after some training: [tasks]; for `host_training` [tasks] see `train_step`."""
        return CHANCE_SCORE + (self.level - CHANCE_SCORE) * (1 - torch.exp(-host_training / self.pace))

    def trained_share(self, seed_training: Tensor) -> Tensor:
        """The share of its gain that a seed has reached; for `seed_training` [tasks, slots] see `train_step`."""
        return 1 - torch.exp(-seed_training / self.delay.unsqueeze(1))


def train_step(host_training: Tensor, seed_training: Tensor, cost: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Train hosts and seeds for one of `steps` steps, each with the same share of the budget.

    Training is measured in batches, relative to those that the budget buys without seeds.

    Arguments:
        host_training: [tasks], training of the host so far
        seed_training: [tasks, slots], training of each seed so far
        cost: [tasks, slots], of the current seeds relative to the host; 0 without a seed
    """
    batches = 1 / (steps * (1 + cost.sum(1)))
    return host_training + batches, torch.where(cost > 0, seed_training + batches.unsqueeze(1), 0.0)


def draw_tasks(numbers: Sequence[int], slots: int, blueprints: Sequence[str]) -> OracleTasks:
    """The tasks of some task numbers.

    Arguments:
        numbers: below TASKS
        slots: columns; tasks have at most max(HELD_OUT_SLOT_RANGE) of them
        blueprints: names
    """
    drawn = [_draw_task(number, slots, blueprints) for number in numbers]
    return OracleTasks(**{name: torch.stack([task[name] for task in drawn]) for name in drawn[0]})


def _draw_task(number: int, slots: int, blueprints: Sequence[str]) -> dict[str, Tensor]:
    is_held_out = number in SPLITS["heldout"]
    generator = make_generator("oracle task", number)
    count_draw, cost_draw, gain_draw, bend_draw, level_draw, pace_draw, delay_draw, noise_draw = torch.rand(
        8, generator=generator
    ).tolist()
    low, high = HELD_OUT_SLOT_RANGE if is_held_out else SLOT_RANGE
    count = low + int(count_draw * (high - low + 1))
    exists = torch.arange(slots) < count
    depth = torch.arange(1, slots + 1) / (count + 1)
    weight = torch.where(exists, torch.exp(BEND * (2 * bend_draw - 1) * (2 * depth - 1)), 0.0)
    lack, total = LACKS[number % len(LACKS)], _between(GAIN_RANGE, gain_draw)
    reference = _log_between(HELD_OUT_COST_RANGE if is_held_out else COST_RANGE, cost_draw)
    entries = [blueprint(TOPOLOGY, name) for name in blueprints]
    size = blueprint(TOPOLOGY, REFERENCE).parameters(SLOT_CHANNELS)
    cost = torch.tensor([reference * entry.parameters(SLOT_CHANNELS) / size for entry in entries])
    shares = []
    for entry in entries:
        draw = float(torch.rand((), generator=make_generator(f"oracle task, {entry.name}", number)))
        if lack is None:
            shares.append(min(OTHER_RANGE) * draw)
        else:
            shares.append(_between(MATCH_RANGE if lack in entry.kinds else OTHER_RANGE, draw))
    return {
        "exists": exists,
        "gain": total * (weight / weight.sum()).unsqueeze(1) * torch.tensor(shares),
        "cost": torch.where(exists.unsqueeze(1), cost / count, 0.0),
        "level": torch.tensor(_between(LEVEL_RANGE, level_draw) - (0.0 if lack is None else HINT * total)),
        "pace": torch.tensor(_log_between(PACE_RANGE, pace_draw)),
        "delay": torch.tensor(_log_between(DELAY_RANGE, delay_draw)),
        "noise": torch.tensor(_log_between(NOISE_RANGE, noise_draw)),
    }


def _between(bounds: tuple[float, float], draw: float) -> float:
    """A number between two bounds; `draw` is from 0 to 1."""
    low, high = bounds
    return low + (high - low) * draw


def _log_between(bounds: tuple[float, float], draw: float) -> float:
    """A number between two positive bounds, whose logarithm is linear in `draw`, from 0 to 1."""
    low, high = bounds
    return low * math.exp(draw * math.log(high / low))
