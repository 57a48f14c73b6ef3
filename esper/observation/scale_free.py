"""The feature set `scale_free`: the same values mean the same for any host, data set and budget.

Losses are relative to the first one and to chance level, norms relative to the host's, costs relative to the host
without seeds, and times are shares of the budget. A value that was not measured yet is -1.
"""

import torch
from torch import Tensor

from esper.lifecycle import Blend, Op, Stage
from esper.observation.features import Feature, FeatureSet, column, mark_missing, one_hot, share_of_steps, stage_share
from esper.observation.view import HISTORY, ClockView, View

LOG_SCALE = 3.0  # ln of a factor of 20 is 3
GAIN_SCALE = 10.0  # differences of losses are small: a tenth of the loss at chance level is 1


def _clock(view: View) -> ClockView:
    if view.clock is None:
        raise ValueError("environment.features=scale_free: must be absolute in an environment without hosts.")
    return view.clock


def _log(ratio: Tensor) -> Tensor:
    """ln of a ratio, scaled and clipped to [-2, 2]; -1 where it was not measured."""
    logarithm = torch.nan_to_num(ratio.clamp(min=1e-9).log(), nan=0.0, posinf=1e4)
    return mark_missing(ratio, (logarithm / LOG_SCALE).clamp(-2, 2))


def _gain(difference: Tensor, view: View) -> Tensor:
    """A difference of losses, [envs] or [envs, slots], relative to the loss at chance level, clipped to [-2, 2]."""
    chance = _clock(view).chance_loss.view(-1, *[1] * (difference.ndim - 1))
    return mark_missing(difference, (GAIN_SCALE * torch.nan_to_num(difference, nan=0.0) / chance).clamp(-2, 2))


def _relative(loss: Tensor, to: Tensor) -> Tensor:
    """A loss relative to another, [envs], at most 2; non-finite values are 2."""
    ratio = torch.nan_to_num(loss / to, nan=2.0, posinf=2.0).clamp(max=2)
    return mark_missing(loss, ratio)


_BASE: tuple[Feature, ...] = (
    Feature("budget_left", 1, lambda v: column(1 - _clock(v).spent), "share of the budget that is left"),
    Feature("lr_left", 1, lambda v: column(_clock(v).lr_left), "share of the learning rate's sum that is left"),
    Feature(
        "passes",
        1,
        lambda v: column(_log(_clock(v).passes)),
        "ln of the budget, in passes of the host without seeds over the training set, / 3",
    ),
    Feature("cost", 1, lambda v: column(_log(_clock(v).cost)), "ln(cost of a sample / that without seeds) / 3"),
    Feature(
        "loss_to_first", 1, lambda v: column(_relative(v.now.loss, _clock(v).first_loss)), "validation loss / first one"
    ),
    Feature(
        "loss_to_chance",
        1,
        lambda v: column(_relative(v.now.loss, _clock(v).chance_loss)),
        "validation loss / loss at chance level",
    ),
    Feature(
        "train_loss",
        1,
        lambda v: column(_relative(v.now.train_loss, _clock(v).chance_loss)),
        "training loss / loss at chance level",
    ),
    Feature(
        "gap",
        1,
        lambda v: column(_gain(v.now.loss - v.now.train_loss, v)),
        "(validation loss - training loss) / loss at chance level, x 10",
    ),
    Feature(
        "gain",
        1,
        lambda v: column(_gain(v.losses[:, -2] - v.losses[:, -1], v)),
        "decrease of the validation loss in the last step / loss at chance level, x 10",
    ),
    Feature(
        "losses",
        HISTORY,
        lambda v: torch.stack([_relative(past, _clock(v).chance_loss) for past in v.losses.unbind(1)], 1),
        "the latest validation losses, oldest first, / loss at chance level",
    ),
    Feature("fresh", 1, lambda v: column(_clock(v).fresh), "1 if the last step was measured"),
    Feature("stale", 1, lambda v: share_of_steps(v.stale, v), "steps since the best score, as a share of the episode"),
    Feature(
        "growth",
        1,
        lambda v: column(_log(v.now.parameters / v.host_parameters)),
        "ln(parameters / host parameters) / 3",
    ),
    Feature(
        "health",
        1,
        lambda v: column(mark_missing(v.now.health, v.now.health)),
        "health of the host's gradients, 0 to 1",
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
    ),
    Feature("rollback", 1, lambda v: column(v.rollback), "1 if the governor rolled the host back in the last step"),
)
_PER_SLOT: tuple[Feature, ...] = (
    Feature("stage", len(Stage), lambda v: one_hot(v.slots.stage, len(Stage)), "stage, one-hot"),
    Feature(
        "blend",
        len(Blend),
        lambda v: one_hot(v.slots.blend, len(Blend)),
        "blend operator, one-hot; zeros without a seed",
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
    Feature(
        "age",
        1,
        lambda v: column(torch.nan_to_num(_clock(v).spent.unsqueeze(1) - _clock(v).start, nan=0.0)),
        "share of the budget that was spent since germination",
    ),
    Feature(
        "contribution",
        1,
        lambda v: column(_gain(v.now.loss_contribution, v)),
        "latest loss without the seed minus loss with it, / loss at chance level, x 10",
    ),
    Feature(
        "contribution_age",
        1,
        lambda v: column(
            torch.where(v.slots.contribution_age < 0, -1.0, share_of_steps(v.slots.contribution_age, v)[..., 0])
        ),
        "steps since the contribution was measured, as a share of the episode",
    ),
    Feature(
        "isolated_gain",
        1,
        lambda v: column(_gain(v.now.isolated_gain, v)),
        "training loss without the isolated seed minus the loss with it, / loss at chance level, x 10",
    ),
    Feature(
        "gradient_norm",
        1,
        lambda v: column(_log(v.now.seed_gradient_norm / v.now.gradient_norm.unsqueeze(1))),
        "ln(gradient norm of the seed / that of the host) / 3",
    ),
    Feature(
        "health",
        1,
        lambda v: column(mark_missing(v.slots.health, v.slots.health)),
        "health of the seed's gradients, 0 to 1",
    ),
    Feature(
        "size",
        1,
        lambda v: column((v.seed_parameters / v.host_parameters[:, None]).log1p().clamp(max=3) / LOG_SCALE),
        "ln(1 + seed parameters / host parameters) / 3",
    ),
    Feature(
        "cost",
        1,
        lambda v: column(_clock(v).seed_cost.log1p().clamp(max=6) / LOG_SCALE),
        "ln(1 + training FLOPs of the seed / those of the host) / 3",
    ),
    Feature(
        "last",
        1,
        lambda v: column(one_hot(v.last_slot, v.slots.stage.shape[1])),
        "1 if the last op used this slot",
    ),
)
SCALE_FREE = FeatureSet("scale_free", _BASE, _PER_SLOT)
