"""The feature set `scale_free`: the same values mean the same for any host, data set and budget.

Losses are relative to the first one and to chance level, norms relative to the host's, costs relative to the host
without seeds, and times are shares of the budget. A value that was not measured yet is -1.
"""

import torch
from torch import Tensor

from esper.observation.descriptors import LOG_SCALE
from esper.observation.features import BASE, PER_SLOT, Feature, FeatureSet, column, mark_missing
from esper.observation.view import HISTORY, ClockView, View

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


def _shared(table: tuple[Feature, ...], *names: str) -> tuple[Feature, ...]:
    """Features of the set `absolute` that have no scale either, in the order of `names`."""
    by_name = {feature.name: feature for feature in table}
    return tuple(by_name[name] for name in names)


_BASE: tuple[Feature, ...] = (
    Feature("budget_left", 1, lambda v: column(1 - _clock(v).spent), "share of the budget that is left"),
    Feature("lr_left", 1, lambda v: column(_clock(v).lr_left), "share of the learning rate's sum that is left"),
    Feature(
        "passes",
        1,
        lambda v: column(_log(_clock(v).passes)),
        "ln of the budget, in passes of the host without seeds over the training set, / 3",
    ),
    Feature(
        "cost",
        1,
        lambda v: column(_log(_clock(v).cost)),
        "ln(cost of a sample / that without seeds) / 3",
        group="flops",
    ),
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
        group="train_loss",
    ),
    Feature(
        "gap",
        1,
        lambda v: column(_gain(v.now.loss - v.now.train_loss, v)),
        "(validation loss - training loss) / loss at chance level, x 10",
        group="train_loss",
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
    *_shared(BASE, "stale"),
    Feature(
        "growth",
        1,
        lambda v: column(_log(v.now.parameters / v.host_parameters)),
        "ln(parameters / host parameters) / 3",
    ),
    *_shared(BASE, "health", "training", "blending", "holding", "fossilized", "last_op", "rollback"),
)
_PER_SLOT: tuple[Feature, ...] = (
    *_shared(PER_SLOT, "stage", "blend", "alpha", "alpha_target", "ramp", "steps_in_stage"),
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
        group="contribution",
    ),
    *_shared(PER_SLOT, "contribution_age"),
    Feature(
        "isolated_gain",
        1,
        lambda v: column(_gain(v.now.isolated_gain, v)),
        "training loss without the isolated seed minus the loss with it, / loss at chance level, x 10",
        group="train_loss",
    ),
    Feature(
        "gradient_norm",
        1,
        lambda v: column(_log(v.now.seed_gradient_norm / v.now.gradient_norm.unsqueeze(1))),
        "ln(gradient norm of the seed / that of the host) / 3",
        group="gradients",
    ),
    *_shared(PER_SLOT, "health", "size"),
    Feature(
        "cost",
        1,
        lambda v: column(_clock(v).seed_cost.log1p().clamp(max=6) / LOG_SCALE),
        "ln(1 + training FLOPs of the seed / those of the host) / 3",
        group="flops",
    ),
    *_shared(PER_SLOT, "last", "depth", "channels", "resolution", "cost_share"),
)
SCALE_FREE = FeatureSet("scale_free", _BASE, _PER_SLOT)
