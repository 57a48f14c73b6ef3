"""The feature set `absolute`: scores in points, losses and norms as they are. Features are scaled to about [-1, 1].

To add a feature, add one entry to BASE or PER_SLOT. A value that was not measured yet is -1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from esper.lifecycle import Blend, Op, Stage
from esper.observation.view import HISTORY, View

SYMLOG_SCALE = 3.0  # symlog of a loss or norm of 20 is 3
CHANNEL_SCALE = 6.0  # ln of 400 channels is 6
GROUPS = ("contribution", "gradients", "flops", "train_loss")  # features that a model may not provide


@dataclass(frozen=True)
class Feature:
    """A named part of the observation.

    `make` returns [envs, width] for an entry of BASE, [envs, slots, width] for one of PER_SLOT.
    """

    name: str
    width: int
    make: Callable[[View], Tensor]
    meaning: str
    options: tuple[str, ...] = ()  # names of the columns of a one-hot feature
    group: str | None = None  # of GROUPS, if a model may not provide it

    @property
    def columns(self) -> tuple[str, ...]:
        """The name of each column; a checkpoint has these names."""
        if self.options:
            return tuple(f"{self.name}={option}" for option in self.options)
        return (self.name,) if self.width == 1 else tuple(f"{self.name}[{index}]" for index in range(self.width))


@dataclass(frozen=True)
class FeatureSet:
    """Everything that a controller observes, besides masks and blueprints."""

    name: str
    base: tuple[Feature, ...]  # of the host
    per_slot: tuple[Feature, ...]

    @property
    def base_groups(self) -> dict[str, str | None]:
        """The group of each column of the host, by name."""
        return {column: feature.group for feature in self.base for column in feature.columns}

    @property
    def slot_groups(self) -> dict[str, str | None]:
        """The group of each column of a slot, by name."""
        return {column: feature.group for feature in self.per_slot for column in feature.columns}


def symlog(x: Tensor) -> Tensor:
    """sign(x) log(1 + |x|), scaled and clipped to [-2, 2]; NaN and infinities become the bounds."""
    x = torch.nan_to_num(x, nan=1e4, posinf=1e4, neginf=-1e4)
    return (x.sign() * x.abs().log1p() / SYMLOG_SCALE).clamp(-2, 2)


def mark_missing(x: Tensor, scaled: Tensor) -> Tensor:
    """`scaled`, with -1 where x is NaN."""
    return torch.where(x.isnan(), torch.full_like(scaled, -1.0), scaled)


def _points(x: Tensor) -> Tensor:
    """Symlog of a difference of scores: one point matters for accuracy, text scores may differ by a hundred."""
    return symlog(torch.nan_to_num(x, nan=0.0))


def column(x: Tensor) -> Tensor:
    return x.float().unsqueeze(-1)


def _score(x: Tensor) -> Tensor:
    """Compress a score: accuracy in points, 0 to 100, or bits per byte times -100."""
    return (x.sign() * (x.abs() / 100).log1p()).clamp(-2, 1)


def share_of_steps(x: Tensor, view: View) -> Tensor:
    """Steps as a share of the episode."""
    return column((x.float() / view.steps).clamp(max=1))


def _gain(view: View) -> Tensor:
    return view.scores[:, -1] - view.scores[:, -2]


def stage_share(view: View, *stages: Stage) -> Tensor:
    """Share of the host's slots in one of the stages."""
    return view.slots.in_stage(stages).float().sum(1) / view.slots.exists.sum(1)


def one_hot(x: Tensor, size: int) -> Tensor:
    """All zeros where x is -1."""
    return F.one_hot(x + 1, size + 1)[..., 1:].float()


BASE: tuple[Feature, ...] = (
    Feature("progress", 1, lambda v: torch.full((len(v.best), 1), v.step / v.steps), "finished share of the episode"),
    Feature("loss", 1, lambda v: column(symlog(v.now.loss)), "validation loss, symlog"),
    Feature(
        "score", 1, lambda v: column(_score(v.now.score)), "validation score, sign(score) ln(1 + abs(score) / 100)"
    ),
    Feature(
        "train_loss",
        1,
        lambda v: column(mark_missing(v.now.train_loss, symlog(v.now.train_loss))),
        "training loss, symlog",
        group="train_loss",
    ),
    Feature(
        "train_accuracy",
        1,
        lambda v: column(mark_missing(v.now.train_accuracy, v.now.train_accuracy)),
        "training accuracy, 0 to 1",
        group="train_loss",
    ),
    Feature(
        "gap",
        1,
        lambda v: column(mark_missing(v.now.train_accuracy, (v.now.train_accuracy - v.now.accuracy).clamp(-1, 1))),
        "training minus validation accuracy",
        group="train_loss",
    ),
    Feature(
        "gain",
        1,
        lambda v: column(mark_missing(_gain(v), _points(_gain(v)))),
        "change of the score in the last step, symlog of points",
    ),
    Feature(
        "losses",
        HISTORY,
        lambda v: mark_missing(v.losses, symlog(v.losses)),
        "the latest validation losses, oldest first, symlog",
    ),
    Feature(
        "scores",
        HISTORY,
        lambda v: mark_missing(v.scores, _score(v.scores)),
        "the latest scores, oldest first, scaled like `score`",
    ),
    Feature(
        "below_best",
        1,
        lambda v: column(_points(v.best - v.now.score)),
        "best score so far minus the current score, symlog of points",
    ),
    Feature("stale", 1, lambda v: share_of_steps(v.stale, v), "steps since the best score, as a share of the episode"),
    Feature(
        "growth",
        1,
        lambda v: column((v.now.parameters / v.host_parameters).log().clamp(max=3) / 3),
        "ln(parameters / host parameters) / 3",
    ),
    Feature(
        "gradient_norm",
        1,
        lambda v: column(mark_missing(v.now.gradient_norm, symlog(v.now.gradient_norm))),
        "gradient norm of the host, symlog",
        group="gradients",
    ),
    Feature(
        "health",
        1,
        lambda v: column(mark_missing(v.now.health, v.now.health)),
        "health of the host's gradients, 0 to 1",
        group="gradients",
    ),
    Feature(
        "training",
        1,
        lambda v: column(stage_share(v, Stage.GERMINATED, Stage.TRAINING)),
        "share of slots in GERMINATED or TRAINING",
    ),
    Feature("blending", 1, lambda v: column(stage_share(v, Stage.BLENDING)), "share of slots in BLENDING"),
    Feature("holding", 1, lambda v: column(stage_share(v, Stage.HOLDING)), "share of slots in HOLDING"),
    Feature("fossilized", 1, lambda v: column(stage_share(v, Stage.FOSSILIZED)), "share of slots in FOSSILIZED"),
    Feature(
        "last_op",
        len(Op),
        lambda v: one_hot(v.last_op, len(Op)),
        "op of the last step, one-hot; zeros before the first step",
        options=tuple(Op.__members__),
    ),
    Feature("rollback", 1, lambda v: column(v.rollback), "1 if the governor rolled the host back in the last step"),
)
PER_SLOT: tuple[Feature, ...] = (
    Feature(
        "stage",
        len(Stage),
        lambda v: one_hot(v.slots.stage, len(Stage)),
        "stage, one-hot",
        options=tuple(Stage.__members__),
    ),
    Feature(
        "blend",
        len(Blend),
        lambda v: one_hot(v.slots.blend, len(Blend)),
        "blend operator, one-hot; zeros without a seed",
        options=tuple(Blend.__members__),
    ),
    Feature("alpha", 1, lambda v: column(v.slots.alpha), "how much of the seed is blended in, 0 to 1"),
    Feature("alpha_target", 1, lambda v: column(v.slots.alpha_target), "value that alpha moves to"),
    Feature(
        "ramp",
        1,
        lambda v: column(v.slots.ramp_done / v.slots.ramp_ticks.clamp(min=1)),
        "finished share of the current alpha ramp",
    ),
    Feature(
        "steps_in_stage",
        1,
        lambda v: share_of_steps(v.slots.steps_in_stage, v),
        "steps in this stage, as a share of the episode",
    ),
    Feature("age", 1, lambda v: share_of_steps(v.slots.age, v), "steps since germination, as a share of the episode"),
    Feature(
        "contribution",
        1,
        lambda v: column(mark_missing(v.slots.contribution, _points(v.slots.contribution))),
        "latest measured contribution, symlog of points",
        group="contribution",
    ),
    Feature(
        "contribution_age",
        1,
        lambda v: column(
            torch.where(v.slots.contribution_age < 0, -1.0, share_of_steps(v.slots.contribution_age, v)[..., 0])
        ),
        "steps since the contribution was measured, as a share of the episode",
        group="contribution",
    ),
    Feature(
        "progress",
        1,
        lambda v: column(mark_missing(v.now.progress, _points(v.now.progress))),
        "change of the score since germination, symlog of points",
    ),
    Feature(
        "isolated_gain",
        1,
        lambda v: column(mark_missing(v.now.isolated_gain, v.now.isolated_gain.clamp(-1, 1))),
        "training loss without the isolated seed minus the loss with it",
        group="train_loss",
    ),
    Feature(
        "gradient_norm",
        1,
        lambda v: column(mark_missing(v.now.seed_gradient_norm, symlog(v.now.seed_gradient_norm))),
        "gradient norm of the seed, symlog",
        group="gradients",
    ),
    Feature(
        "health",
        1,
        lambda v: column(mark_missing(v.slots.health, v.slots.health)),
        "health of the seed's gradients, 0 to 1",
        group="gradients",
    ),
    Feature(
        "size",
        1,
        lambda v: column((v.seed_parameters / v.host_parameters[:, None]).log1p().clamp(max=3) / 3),
        "ln(1 + seed parameters / host parameters) / 3",
    ),
    Feature(
        "last",
        1,
        lambda v: column(v.last_slots),
        "1 if the last op used this slot",
    ),
    Feature("depth", 1, lambda v: column(v.descriptors.depth), "position of the slot in the host, 0 to 1"),
    Feature(
        "channels",
        1,
        lambda v: column(v.descriptors.channels.clamp(min=1).log() / CHANNEL_SCALE),
        "ln(channels at the slot) / 6",
    ),
    Feature(
        "resolution",
        1,
        lambda v: column(v.descriptors.resolution),
        "pixels or tokens at the slot / those of the input",
    ),
    Feature(
        "cost_share",
        1,
        lambda v: column(v.descriptors.cost),
        "share of the host's FLOPs between the slot before and this one",
        group="flops",
    ),
)
ABSOLUTE = FeatureSet("absolute", BASE, PER_SLOT)
